"""Known issues of DeepSpeed and FSDP: how models are placed, sharded, trained and saved on several ranks."""
