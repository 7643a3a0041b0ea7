"""Low-rank adapters on experts that stay on disk: PEFT's ``target_parameters``, on patched models."""
