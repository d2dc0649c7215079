"""``vllm.model_executor.model_loader.weight_utils``: TRL 0.26 and later mend a progress bar here; there is none."""
