"""What is sent: boxes of tensors, from trainer ranks to engine ranks. Pure: no process groups, no weights."""
