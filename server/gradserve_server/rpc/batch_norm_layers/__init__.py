"""BatchNormLayerService."""
