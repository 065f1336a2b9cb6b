"""Weights from and to folders of Hugging Face: `config.json`, safetensors files, and the tokenizer beside them.

`architectures`: what a config.json says as settings of a model, and back. `names`: where each parameter lies in such a
folder. `folder`: reading and writing one, a tensor at a time. `load`, `save`: a run folder from one, and one of a run.
"""
