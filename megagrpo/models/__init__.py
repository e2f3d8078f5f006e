"""HF checkpoints as Megatron-core models, by one list of parameter rules for each family."""
