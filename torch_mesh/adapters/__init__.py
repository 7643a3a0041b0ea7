"""Low-rank adapters on experts of patched models: PEFT's ``target_parameters``."""
