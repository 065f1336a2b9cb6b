"""Writes readable YAML: keys in their given order, multi-line text as blocks."""

from __future__ import annotations

from typing import Any

import yaml


class _Readable(yaml.SafeDumper):
    """Indents lists below their key, and writes multi-line text as a block."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, indentless=False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Readable.add_representer(str, _text)


def yaml_text(described: dict[str, Any]) -> str:
    """Return a mapping as ASCII YAML, because PyYAML reads some other characters as line breaks."""
    return yaml.dump(described, Dumper=_Readable, sort_keys=False, width=1000)
