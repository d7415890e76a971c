"""The servicer of BatchNormLayerService, and its messages."""
