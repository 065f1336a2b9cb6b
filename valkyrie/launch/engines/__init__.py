"""Launch engines, one module each: a `Config` that derives from `valkyrie.launch.engine.EngineConfig`."""
