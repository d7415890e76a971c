// Elements as numbers of arithmetic, and numbers rounded to elements, to the nearest, ties to even.

// The type in which elements are added: float for the narrow ones.
template <typename T>
struct ArithmeticOf {
    using Type = float;
};

template <>
struct ArithmeticOf<double> {
    using Type = double;
};

template <typename A>
struct As {
    template <typename T>
    static __device__ __forceinline__ A number(T element) {
        return widen(element);
    }
};

template <>
struct As<double> {
    template <typename T>
    static __device__ __forceinline__ double number(T element) {
        return as_double(widen(element));
    }

    static __device__ __forceinline__ double number(double element) { return element; }
};

__device__ __forceinline__ void round_to(float value, float& element) { element = value; }

__device__ __forceinline__ void round_to(float value, Half& element) { narrow(value, element); }

__device__ __forceinline__ void round_to(float value, BFloat16& element) { narrow(value, element); }

__device__ __forceinline__ void round_to(float value, double& element) { element = as_double(value); }

__device__ __forceinline__ void round_to(double value, double& element) { element = value; }

__device__ __forceinline__ void round_to(double value, float& element) { element = as_float(value); }

// Twice, as on the host.
__device__ __forceinline__ void round_to(double value, BFloat16& element) { narrow(as_float(value), element); }

// Once: the float has all digits that a half can have, and its last one says whether there were others.
__device__ __forceinline__ void round_to(double value, Half& element) {
    const long long bits = __double_as_longlong(value);
    const long long lost = (1LL << 29) - 1;
    const long long kept = (bits & ~lost) | ((bits & lost) != 0 ? 1LL << 29 : 0);
    narrow(as_float(__longlong_as_double(kept)), element);
}

// What is left of a number in elements of a type.
template <typename T, typename A>
__device__ __forceinline__ A rounded(A value) {
    T element;
    round_to(value, element);
    return As<A>::number(element);
}

__device__ __forceinline__ bool is_finite(Half element) { return (element.bits & 0x7c00) != 0x7c00; }

__device__ __forceinline__ bool is_finite(BFloat16 element) { return (element.bits & 0x7f80) != 0x7f80; }

__device__ __forceinline__ bool is_finite(float element) {
    return (__float_as_uint(element) & 0x7f800000u) != 0x7f800000u;
}

__device__ __forceinline__ bool is_finite(double element) {
    return (__double_as_longlong(element) & 0x7ff0000000000000LL) != 0x7ff0000000000000LL;
}
