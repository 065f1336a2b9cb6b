"""Converts weights from and to Hugging Face folders: `config.json`, safetensors files and tokenizer files.

`architectures` lists the supported model classes. `settings` converts config.json to model settings and back. `names`
maps parameters to tensors. `folder` reads and writes Hugging Face folders. `load` converts a Hugging Face folder to a
run folder, and `save` does the reverse.
"""
