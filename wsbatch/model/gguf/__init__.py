"""GGUF files: what they say about a model, tensor by tensor and key by key, as a Hugging Face checkpoint."""
