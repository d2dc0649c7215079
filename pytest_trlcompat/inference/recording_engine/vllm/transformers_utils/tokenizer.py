"""``vllm.transformers_utils.tokenizer``: TRL 0.26 and later mend a function here; there is none."""
