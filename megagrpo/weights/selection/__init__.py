"""What a publish sends: everything, or what changed; `base.py` holds the contract."""
