// FusedBatchNorm; the formulas are in reference.py.

// The order and types of the members are those of `FORWARD_ARGUMENTS` in launches.py.
template <typename U>
struct ForwardArguments {
    const void* x;
    const U* scale;
    const U* offset;
    const U* mean;
    const U* variance;
    void* y;
    U* batch_mean;
    U* batch_variance;
    U* saved_mean;
    U* saved_variance;
    U* reserve_space_3;
    U* partial_sums;
    unsigned int* tickets;
    Layout layout;
    U epsilon;
    U exponential_avg_factor;
    U bessel_correction;
    U is_training;  // 1 or 0
};

// The mean of two groups of numbers, of which the second one has the share `weight`.
template <typename U>
__device__ __forceinline__ U merged_mean(U mean, U other, U weight) {
    const U merged = mean + (other - mean) * weight;
    // With an infinity in one of the groups, the difference is not a number where the mean is infinite.
    return merged == merged ? merged : mean * (1 - weight) + other * weight;
}

// The number, mean and variance of each lane's elements minus the first one of the channel.
// Merged as in Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances",
// 1979, but with means of squares in place of their sums, which overflow earlier. Subtracting a typical value of the
// channel keeps digits if the mean is large.
template <typename U, int LANES>
struct Moments {
    using Value = U;
    static constexpr int SIZE = 2 * LANES + 1;

    U values[SIZE];

    __device__ __forceinline__ Moments() {
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            values[i] = 0;
        }
    }

    __device__ __forceinline__ U& count() { return values[0]; }

    __device__ __forceinline__ U& mean(int lane) { return values[1 + lane]; }

    __device__ __forceinline__ U& variance(int lane) { return values[1 + LANES + lane]; }

    __device__ __forceinline__ void merge_lane(int lane, U other_mean, U other_variance, U weight) {
        const U difference = other_mean - mean(lane);
        const U between = (difference * weight) * (difference * (1 - weight));
        variance(lane) += (other_variance - variance(lane)) * weight + between;
        mean(lane) = merged_mean(mean(lane), other_mean, weight);
    }

    __device__ __forceinline__ void merge(Moments& other) {
        const U total = count() + other.count();
        const U weight = total == 0 ? U(0) : other.count() / total;
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane) {
            merge_lane(lane, other.mean(lane), other.variance(lane), weight);
        }
        count() = total;
    }

    // Merges the first `used` vectors, whose moments come in two steps: the mean, and the deviations from it.
    template <typename T, int WIDTH, int NUM_VECTORS>
    __device__ __forceinline__ void add(const Vector<T, WIDTH> (&x)[NUM_VECTORS], int used, const U* shift) {
        const U added = static_cast<U>(used * (WIDTH / LANES));
        const U inverse_added = 1 / added;
        const U weight = added / (count() + added);
        count() += added;
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane) {
            U sum = 0;
#pragma unroll
            for (int i = 0; i < NUM_VECTORS; ++i) {
#pragma unroll
                for (int element = lane; element < WIDTH; element += LANES) {
                    if (i < used) {
                        sum += widen(x[i].elements[element]) - shift[lane];
                    }
                }
            }
            const U added_mean = sum * inverse_added;
            U added_variance = 0;
#pragma unroll
            for (int i = 0; i < NUM_VECTORS; ++i) {
#pragma unroll
                for (int element = lane; element < WIDTH; element += LANES) {
                    if (i < used) {
                        const U deviation = widen(x[i].elements[element]) - shift[lane] - added_mean;
                        added_variance += deviation * (deviation * inverse_added);
                    }
                }
            }
            merge_lane(lane, added_mean, added_variance, weight);
        }
    }
};

// Vectors that a thread loads before it uses the first: enough to hide the memory's latency, few enough for the
// registers.
template <int WIDTH>
constexpr int BATCH = WIDTH == 1 ? 8 : 4;

template <typename T, int WIDTH, int LANES>
__device__ __forceinline__ void load_shifts(
    const ForwardArguments<Param<T>>& arguments, const Place<WIDTH, LANES>& place, Param<T> (&shift)[LANES]) {
    Vector<T, LANES> first;
    const bool has_elements = place.has_channels && arguments.layout.positions > 0;
    if (has_elements) {
        first.load(static_cast<const T*>(arguments.x) + place.channel * arguments.layout.inner);
    }
#pragma unroll
    for (int lane = 0; lane < LANES; ++lane) {
        const Param<T> element = has_elements ? widen(first.elements[lane]) : Param<T>(0);
        // A difference from an infinity would not be a number.
        shift[lane] = element - element == 0 ? element : Param<T>(0);
    }
}

__device__ __forceinline__ float not_a_number(float) { return __uint_as_float(0x7fc00000u); }

__device__ __forceinline__ double not_a_number(double) { return not_a_number(0.0f); }

template <typename U>
__device__ __forceinline__ void write_scalar(const ForwardArguments<U>& arguments) {
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
        *arguments.reserve_space_3 = 0;
    }
}

template <typename U, int LANES>
__device__ __forceinline__ void write_moments(
    const ForwardArguments<U>& arguments, long long first_channel, Moments<U, LANES>& moments, const U* shift) {
    const U factor = arguments.exponential_avg_factor;
#pragma unroll
    for (int lane = 0; lane < LANES; ++lane) {
        const long long channel = first_channel + lane;
        const bool is_empty = moments.count() == 0;
        const U mean = moments.mean(lane) + shift[lane];
        const U variance = moments.variance(lane);
        U batch_mean = mean;
        U batch_variance = variance * arguments.bessel_correction;
        if (factor != 1) {
            batch_mean = (1 - factor) * arguments.mean[channel] + factor * batch_mean;
            batch_variance = (1 - factor) * arguments.variance[channel] + factor * batch_variance;
        }
        arguments.batch_mean[channel] = is_empty ? not_a_number(U(0)) : batch_mean;
        arguments.batch_variance[channel] = is_empty ? not_a_number(U(0)) : batch_variance;
        arguments.saved_mean[channel] = mean;
        arguments.saved_variance[channel] = variance;
    }
}

template <typename U, int LANES>
__device__ __forceinline__ void write_frozen_moments(const ForwardArguments<U>& arguments, long long first_channel) {
    const bool is_empty = arguments.layout.positions == 0;
#pragma unroll
    for (int lane = 0; lane < LANES; ++lane) {
        const long long channel = first_channel + lane;
        arguments.batch_mean[channel] = is_empty ? not_a_number(U(0)) : arguments.mean[channel];
        arguments.batch_variance[channel] = is_empty ? not_a_number(U(0)) : arguments.variance[channel];
        arguments.saved_mean[channel] = 0;
        arguments.saved_variance[channel] = 0;
    }
}

// y = factor (x - mean) + offset
template <typename U, int LANES>
struct ForwardCoefficients {
    U mean[LANES];
    U factor[LANES];
    U offset[LANES];

    __device__ __forceinline__ ForwardCoefficients(
        const ForwardArguments<U>& arguments, long long channel, const U (&means)[LANES], const U (&variances)[LANES]) {
        load_lanes(arguments.scale + channel, factor);
        load_lanes(arguments.offset + channel, offset);
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane) {
            mean[lane] = means[lane];
            factor[lane] *= inverse_square_root(variances[lane] + arguments.epsilon);
        }
    }

    template <typename T, int WIDTH>
    __device__ __forceinline__ Vector<T, WIDTH> apply(const Vector<T, WIDTH>& x) const {
        Vector<T, WIDTH> y;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            const int lane = i % LANES;
            narrow((widen(x.elements[i]) - mean[lane]) * factor[lane] + offset[lane], y.elements[i]);
        }
        return y;
    }
};

// First pass of two in training: the moments.
template <typename T, int WIDTH, int LANES>
__device__ __forceinline__ void forward_moments(const ForwardArguments<Param<T>>& arguments) {
    using U = Param<T>;
    constexpr int SIZE = BATCH<WIDTH>;
    const T* x_elements = static_cast<const T*>(arguments.x);
    const Place<WIDTH, LANES> place(arguments.layout, blockIdx.x, blockIdx.y);
    U shift[LANES];
    load_shifts<T>(arguments, place, shift);
    Moments<U, LANES> moments;
    for (Walk<WIDTH, LANES, false> walk(arguments.layout, place); walk.remaining > 0; walk.remaining -= SIZE) {
        Vector<T, WIDTH> x[SIZE];
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            if (i < walk.remaining) {
                x[i].load(x_elements + walk.offset);
                walk.advance();
            }
        }
        moments.add(x, walk.remaining < SIZE ? walk.remaining : SIZE, shift);
    }
    if (reduce_tile(moments, place, arguments.partial_sums, arguments.tickets) && place.holds_sums() &&
        place.has_channels) {
        write_moments(arguments, place.channel, moments, shift);
    }
}

// Second pass of two in training; otherwise the only one. Backwards, to begin with what the first pass left in the
// cache.
template <typename T, int WIDTH, int LANES>
__device__ __forceinline__ void forward_normalize(const ForwardArguments<Param<T>>& arguments) {
    using U = Param<T>;
    constexpr int SIZE = BATCH<WIDTH>;
    const bool is_training = arguments.is_training != 0;
    const T* x_elements = static_cast<const T*>(arguments.x);
    T* y_elements = static_cast<T*>(arguments.y);
    const Place<WIDTH, LANES> place(arguments.layout, gridDim.x - 1 - blockIdx.x, gridDim.y - 1 - blockIdx.y);
    write_scalar(arguments);
    if (!is_training && place.split == 0 && place.holds_sums() && place.has_channels) {
        write_frozen_moments<U, LANES>(arguments, place.channel);
    }
    if (place.count == 0) {
        return;
    }
    U mean[LANES];
    U variance[LANES];
    load_lanes((is_training ? arguments.saved_mean : arguments.mean) + place.channel, mean);
    load_lanes((is_training ? arguments.saved_variance : arguments.variance) + place.channel, variance);
    const ForwardCoefficients<U, LANES> coefficients(arguments, place.channel, mean, variance);
    for (Walk<WIDTH, LANES, true> walk(arguments.layout, place); walk.remaining > 0; walk.remaining -= SIZE) {
        Vector<T, WIDTH> x[SIZE];
        Walk writer = walk;
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            if (i < walk.remaining) {
                x[i].load_last(x_elements + walk.offset);
                walk.advance();
            }
        }
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            if (i < walk.remaining) {
                coefficients.apply(x[i]).store(y_elements + writer.offset);
                writer.advance();
            }
        }
    }
}

// Both passes at once, for a tile whose x fits into shared memory.
template <typename T, int WIDTH, int LANES>
__device__ __forceinline__ void forward_whole(const ForwardArguments<Param<T>>& arguments) {
    using U = Param<T>;
    constexpr int SIZE = BATCH<WIDTH>;
    const T* x_elements = static_cast<const T*>(arguments.x);
    T* y_elements = static_cast<T*>(arguments.y);
    const Place<WIDTH, LANES> place(arguments.layout, blockIdx.x, 0);
    auto* kept = shared_vectors<T, WIDTH, Moments<U, LANES>>() + threadIdx.x;
    U shift[LANES];
    load_shifts<T>(arguments, place, shift);
    Moments<U, LANES> moments;
    auto* keep = kept;
    for (Walk<WIDTH, LANES, false> walk(arguments.layout, place); walk.remaining > 0; walk.remaining -= SIZE) {
        Vector<T, WIDTH> x[SIZE];
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            if (i < walk.remaining) {
                x[i].load_last(x_elements + walk.offset);
                walk.advance();
            }
        }
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            if (i < walk.remaining) {
                keep->word() = x[i].word();
                keep += blockDim.x;
            }
        }
        moments.add(x, walk.remaining < SIZE ? walk.remaining : SIZE, shift);
    }
    reduce_block(moments, place.columns);
    write_scalar(arguments);
    if (place.holds_sums() && place.has_channels) {
        write_moments(arguments, place.channel, moments, shift);
    }
    broadcast(moments, place.columns);
    if (place.count == 0) {
        return;
    }
    U mean[LANES];
    U variance[LANES];
#pragma unroll
    for (int lane = 0; lane < LANES; ++lane) {
        mean[lane] = moments.mean(lane) + shift[lane];
        variance[lane] = moments.variance(lane);
    }
    const ForwardCoefficients<U, LANES> coefficients(arguments, place.channel, mean, variance);
    for (Walk<WIDTH, LANES, false> walk(arguments.layout, place); walk.remaining > 0; --walk.remaining) {
        Vector<T, WIDTH> x;
        x.word() = kept->word();
        coefficients.apply(x).store(y_elements + walk.offset);
        kept += blockDim.x;
        walk.advance();
    }
}
