"""A decoder with the weights of Llama, Qwen2 or Gemma."""
