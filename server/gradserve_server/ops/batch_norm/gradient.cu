// FusedBatchNormGrad; the formulas are in reference.py.

// The order and types of the members are those of `GRADIENT_ARGUMENTS` in launches.py.
template <typename U>
struct GradientArguments {
    const void* y_backprop;
    const void* x;
    const U* scale;
    const U* mean;
    const U* variance;
    void* x_backprop;
    U* scale_backprop;
    U* offset_backprop;
    U* partial_sums;
    unsigned int* tickets;
    Layout layout;
    U epsilon;
    U inverse_count;  // of the elements of a channel
};

// sum dy and sum dy (x - mean) reduction of each lane. The reduction is about 1 / sqrt(variance + epsilon), so the
// products have about the range of dy; it is a power of two, so it costs no digits.
template <typename U, int LANES>
struct GradientSums {
    using Value = U;
    static constexpr int SIZE = 2 * LANES;

    U values[SIZE];

    __device__ __forceinline__ GradientSums() {
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            values[i] = 0;
        }
    }

    __device__ __forceinline__ U& sum(int lane) { return values[lane]; }

    __device__ __forceinline__ U& dot(int lane) { return values[LANES + lane]; }

    __device__ __forceinline__ void merge(const GradientSums& other) {
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            values[i] += other.values[i];
        }
    }

    // The terms of a vector are added up first: short sums lose less to rounding.
    template <typename T, int WIDTH>
    __device__ __forceinline__ void add(
        const Vector<T, WIDTH>& dy, const Vector<T, WIDTH>& x, const U* mean, const U* reduction) {
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane) {
            U vector_sum = 0;
            U vector_dot = 0;
#pragma unroll
            for (int i = lane; i < WIDTH; i += LANES) {
                const U element = widen(dy.elements[i]);
                vector_sum += element;
                vector_dot += element * ((widen(x.elements[i]) - mean[lane]) * reduction[lane]);
            }
            sum(lane) += vector_sum;
            dot(lane) += vector_dot;
        }
    }
};

// Computes scale_backprop and offset_backprop from the sums, and writes them.
template <typename U, int LANES>
__device__ __forceinline__ void finish_sums(
    const GradientArguments<U>& arguments, long long channel, GradientSums<U, LANES>& sums) {
#pragma unroll
    for (int lane = 0; lane < LANES; ++lane) {
        // For an empty x both are 0, even if the deviation is 0.
        if (arguments.layout.positions > 0) {
            const U inverse = inverse_square_root(arguments.variance[channel + lane] + arguments.epsilon);
            sums.dot(lane) *= inverse / power_of_two(inverse);
        }
        arguments.scale_backprop[channel + lane] = sums.dot(lane);
        arguments.offset_backprop[channel + lane] = sums.sum(lane);
    }
}

// Vectors of each tensor that a thread loads before it uses the first: enough to hide the memory's latency, few enough
// for the registers, of which four lanes' coefficients take many.
template <int WIDTH>
constexpr int READ_BATCH = WIDTH == 1 ? 8 : 4;

template <int WIDTH, int LANES>
constexpr int WRITE_BATCH = LANES == 4 ? 2 : READ_BATCH<WIDTH>;

// x_backprop = factor (dy - mean_of_dy - slope (x - mean)). The factor comes last: multiplied into the slope, it could
// leave the range of U where the result does not.
template <typename U, int LANES>
struct GradientCoefficients {
    U mean[LANES];
    U factor[LANES];
    U slope[LANES];
    U mean_of_dy[LANES];

    __device__ __forceinline__ GradientCoefficients(
        const GradientArguments<U>& arguments, long long channel, const U (&scale_backprop)[LANES],
        const U (&offset_backprop)[LANES]) {
        U variance[LANES];
        load_lanes(arguments.mean + channel, mean);
        load_lanes(arguments.variance + channel, variance);
        load_lanes(arguments.scale + channel, factor);
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane) {
            const U inverse = inverse_square_root(variance[lane] + arguments.epsilon);
            factor[lane] *= inverse;
            slope[lane] = inverse * (scale_backprop[lane] * arguments.inverse_count);
            mean_of_dy[lane] = offset_backprop[lane] * arguments.inverse_count;
        }
    }

    template <typename T, int WIDTH>
    __device__ __forceinline__ Vector<T, WIDTH> apply(const Vector<T, WIDTH>& dy, const Vector<T, WIDTH>& x) const {
        Vector<T, WIDTH> dx;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            const int lane = i % LANES;
            const U centered = widen(x.elements[i]) - mean[lane];
            narrow(factor[lane] * (widen(dy.elements[i]) - mean_of_dy[lane] - slope[lane] * centered), dx.elements[i]);
        }
        return dx;
    }
};

template <typename U, int WIDTH, int LANES>
__device__ __forceinline__ void load_moments(
    const GradientArguments<U>& arguments, const Place<WIDTH, LANES>& place, U (&mean)[LANES], U (&reduction)[LANES]) {
    if (place.has_channels) {
        load_lanes(arguments.mean + place.channel, mean);
        load_lanes(arguments.variance + place.channel, reduction);
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane) {
            reduction[lane] = power_of_two(inverse_square_root(reduction[lane] + arguments.epsilon));
        }
    }
}

// First pass of two: the gradients of scale and offset.
template <typename T, int WIDTH, int LANES>
__device__ __forceinline__ void gradient_sums(const GradientArguments<Param<T>>& arguments) {
    using U = Param<T>;
    constexpr int SIZE = READ_BATCH<WIDTH>;
    const T* x_elements = static_cast<const T*>(arguments.x);
    const T* dy_elements = static_cast<const T*>(arguments.y_backprop);
    const Place<WIDTH, LANES> place(arguments.layout, blockIdx.x, blockIdx.y);
    U mean[LANES];
    U reduction[LANES];
    load_moments(arguments, place, mean, reduction);
    GradientSums<U, LANES> sums;
    for (Walk<WIDTH, LANES, false> walk(arguments.layout, place); walk.remaining > 0; walk.remaining -= SIZE) {
        Vector<T, WIDTH> dy[SIZE];
        Vector<T, WIDTH> x[SIZE];
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            if (i < walk.remaining) {
                dy[i].load(dy_elements + walk.offset);
                x[i].load(x_elements + walk.offset);
                walk.advance();
            }
        }
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            if (i < walk.remaining) {
                sums.add(dy[i], x[i], mean, reduction);
            }
        }
    }
    if (reduce_tile(sums, place, arguments.partial_sums, arguments.tickets) && place.holds_sums() &&
        place.has_channels) {
        finish_sums(arguments, place.channel, sums);
    }
}

// Second pass of two: x_backprop. Backwards, to begin with what the first pass left in the cache.
template <typename T, int WIDTH, int LANES>
__device__ __forceinline__ void gradient_apply(const GradientArguments<Param<T>>& arguments) {
    constexpr int SIZE = WRITE_BATCH<WIDTH, LANES>;
    const T* x_elements = static_cast<const T*>(arguments.x);
    const T* dy_elements = static_cast<const T*>(arguments.y_backprop);
    T* dx_elements = static_cast<T*>(arguments.x_backprop);
    const Place<WIDTH, LANES> place(arguments.layout, gridDim.x - 1 - blockIdx.x, gridDim.y - 1 - blockIdx.y);
    if (place.count == 0) {
        return;
    }
    Param<T> scale_backprop[LANES];
    Param<T> offset_backprop[LANES];
    load_lanes(arguments.scale_backprop + place.channel, scale_backprop);
    load_lanes(arguments.offset_backprop + place.channel, offset_backprop);
    const GradientCoefficients<Param<T>, LANES> coefficients(
        arguments, place.channel, scale_backprop, offset_backprop);
    for (Walk<WIDTH, LANES, true> walk(arguments.layout, place); walk.remaining > 0; walk.remaining -= SIZE) {
        Vector<T, WIDTH> dy[SIZE];
        Vector<T, WIDTH> x[SIZE];
        Walk writer = walk;
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            if (i < walk.remaining) {
                dy[i].load_last(dy_elements + walk.offset);
                x[i].load_last(x_elements + walk.offset);
                walk.advance();
            }
        }
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            if (i < walk.remaining) {
                coefficients.apply(dy[i], x[i]).store(dx_elements + writer.offset);
                writer.advance();
            }
        }
    }
}

// Both passes at once, for a tile whose x and y_backprop fit into shared memory.
template <typename T, int WIDTH, int LANES>
__device__ __forceinline__ void gradient_whole(const GradientArguments<Param<T>>& arguments) {
    using U = Param<T>;
    constexpr int SIZE = READ_BATCH<WIDTH>;
    const T* x_elements = static_cast<const T*>(arguments.x);
    const T* dy_elements = static_cast<const T*>(arguments.y_backprop);
    T* dx_elements = static_cast<T*>(arguments.x_backprop);
    const Place<WIDTH, LANES> place(arguments.layout, blockIdx.x, 0);
    auto* kept = shared_vectors<T, WIDTH, GradientSums<U, LANES>>() + threadIdx.x;
    U mean[LANES];
    U reduction[LANES];
    load_moments(arguments, place, mean, reduction);
    GradientSums<U, LANES> sums;
    auto* keep = kept;
    for (Walk<WIDTH, LANES, false> walk(arguments.layout, place); walk.remaining > 0; walk.remaining -= SIZE) {
        Vector<T, WIDTH> dy[SIZE];
        Vector<T, WIDTH> x[SIZE];
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            if (i < walk.remaining) {
                dy[i].load_last(dy_elements + walk.offset);
                x[i].load_last(x_elements + walk.offset);
                walk.advance();
            }
        }
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            if (i < walk.remaining) {
                keep[0].word() = dy[i].word();
                keep[blockDim.x].word() = x[i].word();
                keep += 2 * blockDim.x;
                sums.add(dy[i], x[i], mean, reduction);
            }
        }
    }
    reduce_block(sums, place.columns);
    if (place.holds_sums() && place.has_channels) {
        finish_sums(arguments, place.channel, sums);
    }
    broadcast(sums, place.columns);
    if (place.count == 0) {
        return;
    }
    U scale_backprop[LANES];
    U offset_backprop[LANES];
#pragma unroll
    for (int lane = 0; lane < LANES; ++lane) {
        scale_backprop[lane] = sums.dot(lane);
        offset_backprop[lane] = sums.sum(lane);
    }
    const GradientCoefficients<U, LANES> coefficients(arguments, place.channel, scale_backprop, offset_backprop);
    for (Walk<WIDTH, LANES, false> walk(arguments.layout, place); walk.remaining > 0; --walk.remaining) {
        Vector<T, WIDTH> dy;
        Vector<T, WIDTH> x;
        dy.word() = kept[0].word();
        x.word() = kept[blockDim.x].word();
        coefficients.apply(dy, x).store(dx_elements + walk.offset);
        kept += 2 * blockDim.x;
        walk.advance();
    }
}

// Not in training, where x_backprop does not depend on the sums: one pass over any x.
template <typename T, int WIDTH, int LANES>
__device__ __forceinline__ void gradient_frozen(const GradientArguments<Param<T>>& arguments) {
    using U = Param<T>;
    constexpr int SIZE = WRITE_BATCH<WIDTH, LANES>;
    const T* x_elements = static_cast<const T*>(arguments.x);
    const T* dy_elements = static_cast<const T*>(arguments.y_backprop);
    T* dx_elements = static_cast<T*>(arguments.x_backprop);
    const Place<WIDTH, LANES> place(arguments.layout, blockIdx.x, blockIdx.y);
    U mean[LANES];
    U reduction[LANES];
    U factor[LANES];
    U variance[LANES];
    load_moments(arguments, place, mean, reduction);
    if (place.has_channels) {
        load_lanes(arguments.scale + place.channel, factor);
        load_lanes(arguments.variance + place.channel, variance);
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane) {
            factor[lane] *= inverse_square_root(variance[lane] + arguments.epsilon);
        }
    }
    GradientSums<U, LANES> sums;
    for (Walk<WIDTH, LANES, false> walk(arguments.layout, place); walk.remaining > 0; walk.remaining -= SIZE) {
        Vector<T, WIDTH> dy[SIZE];
        Vector<T, WIDTH> x[SIZE];
        Walk writer = walk;
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            if (i < walk.remaining) {
                dy[i].load_last(dy_elements + walk.offset);
                x[i].load_last(x_elements + walk.offset);
                walk.advance();
            }
        }
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            if (i < walk.remaining) {
                sums.add(dy[i], x[i], mean, reduction);
                Vector<T, WIDTH> dx;
#pragma unroll
                for (int element = 0; element < WIDTH; ++element) {
                    narrow(factor[element % LANES] * widen(dy[i].elements[element]), dx.elements[element]);
                }
                dx.store(dx_elements + writer.offset);
                writer.advance();
            }
        }
    }
    if (reduce_tile(sums, place, arguments.partial_sums, arguments.tickets) && place.holds_sums() &&
        place.has_channels) {
        finish_sums(arguments, place.channel, sums);
    }
}
