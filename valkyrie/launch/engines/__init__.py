"""Launch engines, one module each. A module defines `Config`, a subclass of `valkyrie.launch.engine.EngineConfig`."""
