"""Rewards: registered functions and users' own, scored in worker processes that can be killed. No torch,
no Megatron here.
"""
