"""Known issues of LoRA's adapters, and of PEFT."""
