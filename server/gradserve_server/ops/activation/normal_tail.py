"""Coefficients for the tail of the normal distribution, F(-a) = erfc(a / 2^.5) / 2 for a >= 0.

e^(a^2 / 2) F(-a) = P(t) / (a + SHIFT) with t = (a - SHIFT) / (a + SHIFT), which brings all a >= 0 to -1 <= t < 1, where
P changes little and slowly (after Shepherd and Laframboise, "Chebyshev approximation of (1 + 2x) exp(x^2) erfc x in
0 <= x < infinity", 1981). The polynomials are Chebyshev interpolations of P, computed with 40 digits: relative errors
are below 2e-8 for float32 and 4e-17 for float64. erf would lose all digits of the tail in 1 + erf.
"""

SHIFT = 5.0

LARGEST = 38.0
"""The a for which e^(-a^2 / 2) is just above the least normal number."""

FLOAT32 = (
    0.0003829018183024107,
    -0.001020416970195398,
    -0.0029831861768943525,
    0.020893542181199893,
    -0.06910409896639616,
    0.1650050060116485,
    -0.31353552641153054,
    0.49530647285148677,
    -0.6653824305737333,
    0.7691930414454985,
)
FLOAT64 = (
    2.224938767716443e-09,
    7.630410417873182e-09,
    -1.0618274174239376e-08,
    -6.667529339227571e-08,
    4.375841598285575e-08,
    4.3443907263764586e-07,
    -3.374965203524632e-07,
    -2.7703209441469523e-06,
    3.981182741532577e-06,
    1.668170360977268e-05,
    -4.9762853165030135e-05,
    -5.937586616736071e-05,
    0.000544899062695852,
    -0.0007978693748911934,
    -0.002993376769094473,
    0.020795066797569855,
    -0.06911863870647982,
    0.1650203661705007,
    -0.3135331566712971,
    0.49530561596997413,
    -0.6653825028900567,
    0.769193049750063,
)
"""Coefficients of P, the highest power first."""
