"""Operations on batch normalization layers."""
