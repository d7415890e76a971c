"""Operations on accumulators."""
