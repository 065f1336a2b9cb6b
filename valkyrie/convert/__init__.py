"""Converts weights from and to Hugging Face folders: `config.json`, safetensors files and tokenizer files.

`architectures`: from config.json to model settings and back. `names`: which tensor holds each parameter.
`folder`: reads and writes a folder, one tensor at a time. `load`: from such a folder to a run folder. `save`: back.
"""
