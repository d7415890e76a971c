// Activation functions and their gradients; the definitions are in spec.py, the formulas in reference.py. A thread
// computes a vector of WIDTH elements at a time. The members of each struct are those of `ARRAYS` in kernels.py, and
// the constants come from there.

__device__ __forceinline__ float exponential(float x) { return expf(x); }

__device__ __forceinline__ double exponential(double x) { return exp(x); }

__device__ __forceinline__ float exponential_minus_1(float x) { return expm1f(x); }

__device__ __forceinline__ double exponential_minus_1(double x) { return expm1(x); }

__device__ __forceinline__ float log_of_1_plus(float x) { return log1pf(x); }

__device__ __forceinline__ double log_of_1_plus(double x) { return log1p(x); }

__device__ __forceinline__ float hyperbolic_tangent(float x) { return tanhf(x); }

__device__ __forceinline__ double hyperbolic_tangent(double x) { return tanh(x); }

// x / y with two units of rounding, for 1 <= y < 2^126. An exact division calls a function, for which registers spill.
__device__ __forceinline__ float divide(float x, float y) { return __fdividef(x, y); }

__device__ __forceinline__ double divide(double x, double y) { return x / y; }

__device__ __forceinline__ float error_function_complement(float x) { return erfcf(x); }

__device__ __forceinline__ double error_function_complement(double x) { return erfc(x); }

// |x|, but at most the limit.
template <typename U>
__device__ __forceinline__ U limited(U x, U limit) {
    const U magnitude = x < 0 ? -x : x;
    return magnitude > limit ? limit : magnitude;
}

constexpr double ALMOST_INFINITE = 1e30;
constexpr double LARGEST_NORMAL = 40;  // from which on e^(-x^2 / 2) is 0
constexpr double SQRT_HALF = 0.7071067811865476;
constexpr double INVERSE_SQRT_2_PI = 0.3989422804014327;

// F(-a).
template <typename U>
__device__ __forceinline__ U normal_tail(U a) {
    return static_cast<U>(0.5) * error_function_complement(a * static_cast<U>(SQRT_HALF));
}

template <typename U>
__device__ __forceinline__ U sigmoid(U x) {
    const U e = exponential(x < 0 ? x : -x);
    return divide(x < 0 ? e : 1, 1 + e);
}

struct Relu {
    template <typename U>
    static __device__ __forceinline__ U forward(U x) {
        return x <= 0 ? 0 : x;
    }

    template <typename U>
    static __device__ __forceinline__ U gradient(U dy, U y) {
        return y > 0 ? dy : 0;
    }
};

struct Relu6 {
    template <typename U>
    static __device__ __forceinline__ U forward(U x) {
        return x <= 0 ? 0 : x > 6 ? 6 : x;
    }

    template <typename U>
    static __device__ __forceinline__ U gradient(U dy, U y) {
        return y > 0 && y < 6 ? dy : 0;
    }
};

struct Tanh {
    template <typename U>
    static __device__ __forceinline__ U forward(U x) {
        return hyperbolic_tangent(x);
    }

    template <typename U>
    static __device__ __forceinline__ U gradient(U dy, U y) {
        return dy * (1 - y * y);
    }
};

struct Sigmoid {
    template <typename U>
    static __device__ __forceinline__ U forward(U x) {
        return sigmoid(x);
    }

    template <typename U>
    static __device__ __forceinline__ U gradient(U dy, U y) {
        return dy * y * (1 - y);
    }
};

struct Elu {
    template <typename U>
    static __device__ __forceinline__ U forward(U x) {
        return x < 0 ? exponential_minus_1(x) : x;
    }

    template <typename U>
    static __device__ __forceinline__ U gradient(U dy, U y) {
        return y < 0 ? dy * (y + 1) : dy;
    }
};

struct Selu {
    template <typename U>
    static __device__ __forceinline__ U forward(U x) {
        return x < 0 ? static_cast<U>(SELU_SCALE_ALPHA) * exponential_minus_1(x) : static_cast<U>(SELU_SCALE) * x;
    }

    template <typename U>
    static __device__ __forceinline__ U gradient(U dy, U y) {
        return dy * (y < 0 ? y + static_cast<U>(SELU_SCALE_ALPHA) : static_cast<U>(SELU_SCALE));
    }
};

struct Softplus {
    template <typename U>
    static __device__ __forceinline__ U forward(U x) {
        return Relu::forward(x) + log_of_1_plus(exponential(x < 0 ? x : -x));
    }

    template <typename U>
    static __device__ __forceinline__ U gradient(U dy, U x) {
        return dy * sigmoid(x);
    }
};

struct Softsign {
    template <typename U>
    static __device__ __forceinline__ U forward(U x) {
        const U magnitude = limited(x, static_cast<U>(ALMOST_INFINITE));
        const U positive = magnitude / (1 + magnitude);
        return x < 0 ? -positive : positive;
    }

    template <typename U>
    static __device__ __forceinline__ U gradient(U dy, U x) {
        const U inverse = 1 / (1 + (x < 0 ? -x : x));
        return dy * inverse * inverse;
    }
};

struct LeakyRelu {
    template <typename U>
    static __device__ __forceinline__ U forward(U x) {
        return x > 0 ? x : static_cast<U>(LEAKY_RELU_SLOPE) * x;
    }

    template <typename U>
    static __device__ __forceinline__ U gradient(U dy, U x) {
        return x > 0 ? dy : static_cast<U>(LEAKY_RELU_SLOPE) * dy;
    }
};

struct Gelu {
    template <typename U>
    static __device__ __forceinline__ U forward(U x) {
        const U magnitude = limited(x, static_cast<U>(LARGEST_NORMAL));
        return Relu::forward(x) - magnitude * normal_tail(magnitude);
    }

    template <typename U>
    static __device__ __forceinline__ U gradient(U dy, U x) {
        const U magnitude = limited(x, static_cast<U>(LARGEST_NORMAL));
        const U density = static_cast<U>(INVERSE_SQRT_2_PI) * exponential(magnitude * magnitude / -2);
        const U negative = normal_tail(magnitude) - magnitude * density;
        return dy * (x < 0 ? negative : 1 - negative);
    }
};

struct Swish {
    template <typename U>
    static __device__ __forceinline__ U forward(U x) {
        const U magnitude = limited(x, static_cast<U>(ALMOST_INFINITE));
        return Relu::forward(x) - magnitude * sigmoid(-magnitude);
    }

    template <typename U>
    static __device__ __forceinline__ U gradient(U dy, U x) {
        const U magnitude = limited(x, static_cast<U>(ALMOST_INFINITE));
        const U tail = sigmoid(-magnitude);
        const U negative = tail - magnitude * (tail * (1 - tail));
        return dy * (x < 0 ? negative : 1 - negative);
    }
};

template <typename T>
struct ForwardArguments {
    const T* x;
    T* out;
    long long count;
};

template <typename Function, int WIDTH, typename T>
__device__ __forceinline__ void compute_forward(const T* x, T* out, long long first) {
    Vector<T, WIDTH> vector;
    vector.load(x + first);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
        narrow(Function::forward(widen(vector.elements[i])), vector.elements[i]);
    }
    vector.store_cached(out + first);
}

template <typename Function, int WIDTH, typename T>
__device__ __forceinline__ void forward(const ForwardArguments<T>& arguments) {
    const long long vectors = arguments.count / WIDTH;
    const long long left = WIDTH * vectors;
    for (GridStride walk; walk.index < vectors; walk.index += walk.step) {
        compute_forward<Function, WIDTH>(arguments.x, arguments.out, walk.index * WIDTH);
    }
    for (GridStride walk; walk.index < arguments.count - left; walk.index += walk.step) {
        compute_forward<Function, 1>(arguments.x, arguments.out, left + walk.index);
    }
}

template <typename T>
struct GradientArguments {
    const T* dy;
    const T* saved;
    T* out;
    long long count;
};

template <typename Function, int WIDTH, typename T>
__device__ __forceinline__ void compute_gradient(const T* dy, const T* saved, T* out, long long first) {
    Vector<T, WIDTH> vector;
    vector.load(dy + first);
    Vector<T, WIDTH> saved_vector;
    saved_vector.load(saved + first);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
        const auto gradient = Function::gradient(widen(vector.elements[i]), widen(saved_vector.elements[i]));
        narrow(gradient, vector.elements[i]);
    }
    vector.store_cached(out + first);
}

template <typename Function, int WIDTH, typename T>
__device__ __forceinline__ void gradient(const GradientArguments<T>& arguments) {
    const long long vectors = arguments.count / WIDTH;
    const long long left = WIDTH * vectors;
    for (GridStride walk; walk.index < vectors; walk.index += walk.step) {
        compute_gradient<Function, WIDTH>(arguments.dy, arguments.saved, arguments.out, walk.index * WIDTH);
    }
    for (GridStride walk; walk.index < arguments.count - left; walk.index += walk.step) {
        compute_gradient<Function, 1>(arguments.dy, arguments.saved, arguments.out, left + walk.index);
    }
}
