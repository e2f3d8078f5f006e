"""megagrpo: RL post-training of pretrained language models at Megatron scale. Importing this package
imports no torch.
"""

__version__ = "0.1.0"
