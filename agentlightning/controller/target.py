"""Imports what a launch spec names. Standard library only: every agent carries it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path


def import_target(name: str) -> object:
    """A module by its dotted name, or by the path of its ``.py`` file."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    module_name = f"agl_file_{Path(name).stem}"
    if module_name in sys.modules and sys.modules[module_name].__file__ == name:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, name)
    if spec is None or spec.loader is None or not Path(name).exists():
        raise ImportError(f"there is no Python file {name}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    sys.path.insert(0, str(Path(name).parent))
    spec.loader.exec_module(module)
    return module
