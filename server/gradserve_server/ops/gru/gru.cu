// GRUBlockCell and its gradient around the products of matrices; the formulas are in reference.py. A thread computes
// one element at a time. The members of each struct are those of `ARGUMENTS` in kernels.py, in this order.

__device__ __forceinline__ float exponential(float x) { return expf(x); }

__device__ __forceinline__ double exponential(double x) { return exp(x); }

__device__ __forceinline__ float hyperbolic_tangent(float x) { return tanhf(x); }

__device__ __forceinline__ double hyperbolic_tangent(double x) { return tanh(x); }

template <typename U>
__device__ __forceinline__ U sigmoid(U x) {
    return 1 / (1 + exponential(-x));
}

template <typename U>
struct GatesArguments {
    const U* ru_of_x;
    const U* ru_of_h;
    const U* b_ru;
    const U* h_prev;
    U* r;
    U* u;
    U* h_prevr;
    long long rows;
    long long cells;
};

template <typename U>
__device__ __forceinline__ void gates(const GatesArguments<U>& arguments) {
    const long long cells = arguments.cells;
    for (GridStride walk; walk.index < arguments.rows * cells; walk.index += walk.step) {
        const long long row = walk.index / cells;
        const long long cell = walk.index - row * cells;
        const long long reset = 2 * row * cells + cell;
        const long long update = reset + cells;
        const U r = sigmoid(arguments.ru_of_x[reset] + arguments.ru_of_h[reset] + arguments.b_ru[cell]);
        const U u = sigmoid(arguments.ru_of_x[update] + arguments.ru_of_h[update] + arguments.b_ru[cells + cell]);
        arguments.r[walk.index] = r;
        arguments.u[walk.index] = u;
        arguments.h_prevr[walk.index] = arguments.h_prev[walk.index] * r;
    }
}

template <typename U>
struct StateArguments {
    const U* c_of_x;
    const U* c_of_h;
    const U* b_c;
    const U* h_prev;
    const U* u;
    U* c;
    U* h;
    long long rows;
    long long cells;
};

template <typename U>
__device__ __forceinline__ void state(const StateArguments<U>& arguments) {
    for (GridStride walk; walk.index < arguments.rows * arguments.cells; walk.index += walk.step) {
        const long long i = walk.index;
        const U c = hyperbolic_tangent(arguments.c_of_x[i] + arguments.c_of_h[i] + arguments.b_c[i % arguments.cells]);
        arguments.c[i] = c;
        arguments.h[i] = arguments.u[i] * (arguments.h_prev[i] - c) + c;
    }
}

template <typename U>
struct GradientOfStateArguments {
    const U* h_prev;
    const U* r;
    const U* u;
    const U* c;
    const U* d_h;
    U* d_c_bar;
    U* d_r_bar_u_bar;
    U* h_prevr;
    long long rows;
    long long cells;
};

// d_c_bar, d_u_bar, and h_prev r for the gradient of w_c.
template <typename U>
__device__ __forceinline__ void gradient_of_state(const GradientOfStateArguments<U>& arguments) {
    const long long cells = arguments.cells;
    for (GridStride walk; walk.index < arguments.rows * cells; walk.index += walk.step) {
        const long long i = walk.index;
        const long long update = i + (i / cells + 1) * cells;
        const U u = arguments.u[i];
        const U c = arguments.c[i];
        const U h_prev = arguments.h_prev[i];
        const U d_c = arguments.d_h[i] * (1 - u);
        arguments.d_c_bar[i] = d_c * (1 - c * c);
        arguments.d_r_bar_u_bar[update] = d_c * u * (h_prev - c);
        arguments.h_prevr[i] = h_prev * arguments.r[i];
    }
}

template <typename U>
struct GradientOfResetArguments {
    const U* d_x_h_prevr;
    const U* h_prev;
    const U* r;
    U* d_r_bar_u_bar;
    long long rows;
    long long inputs;
    long long cells;
};

template <typename U>
__device__ __forceinline__ void gradient_of_reset(const GradientOfResetArguments<U>& arguments) {
    const long long cells = arguments.cells;
    for (GridStride walk; walk.index < arguments.rows * cells; walk.index += walk.step) {
        const long long i = walk.index;
        const long long row = i / cells;
        const U r = arguments.r[i];
        const U d_r = arguments.d_x_h_prevr[i + (row + 1) * arguments.inputs] * arguments.h_prev[i];
        arguments.d_r_bar_u_bar[i + row * cells] = d_r * r * (1 - r);
    }
}

template <typename U>
struct GradientOfInputsArguments {
    const U* d_x_h_prev;
    const U* d_x_h_prevr;
    const U* r;
    const U* u;
    const U* d_h;
    U* d_x;
    U* d_h_prev;
    long long rows;
    long long inputs;
    long long cells;
};

template <typename U>
__device__ __forceinline__ void gradient_of_inputs(const GradientOfInputsArguments<U>& arguments) {
    const long long columns = arguments.inputs + arguments.cells;
    for (GridStride walk; walk.index < arguments.rows * columns; walk.index += walk.step) {
        const long long row = walk.index / columns;
        const long long column = walk.index - row * columns;
        const U d_plain = arguments.d_x_h_prev[walk.index];
        const U d_reset = arguments.d_x_h_prevr[walk.index];
        if (column < arguments.inputs) {
            arguments.d_x[row * arguments.inputs + column] = d_plain + d_reset;
        } else {
            const long long i = row * arguments.cells + column - arguments.inputs;
            arguments.d_h_prev[i] = d_plain + d_reset * arguments.r[i] + arguments.d_h[i] * arguments.u[i];
        }
    }
}

template <typename Source, typename Target>
struct ConvertArguments {
    const Source* source;
    Target* target;
    long long count;
};

template <typename Source, typename Target>
__device__ __forceinline__ void convert(const ConvertArguments<Source, Target>& arguments) {
    for (GridStride walk; walk.index < arguments.count; walk.index += walk.step) {
        narrow(widen(arguments.source[walk.index]), arguments.target[walk.index]);
    }
}
