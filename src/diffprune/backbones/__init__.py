"""Vision-language model families, one file each, named by their Hugging Face `model_type`."""
