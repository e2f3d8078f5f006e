"""Megatron-core is imported by these tests: the device must be set up before."""

from megagrpo.device import device

device.setup()
