"""What builder and runtime share: tensor specs, the plugin interface, weight packing, engine state and the plan."""
