// Convolutions of stride 1 and max-pooling over images with examples innermost: [channels, height, width, examples].
//
// A row of such an image is one run of width * examples numbers; neighbouring columns are EXAMPLES numbers apart.
// Vectors run along rows however few channels there are, and sums stay in registers. Shapes are constants defined
// before this text: IN and OUT (channels), HEIGHT, WIDTH and EXAMPLES (of the image), TALL and WIDE (of the kernel or window),
// and ABOVE (rows of zero padding above and below the image).

#if defined(__AVX512F__)
constexpr long LANES = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr long LANES = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr long LANES = 4, REGISTERS = 32;
#else
constexpr long LANES = 4, REGISTERS = 16;
#endif
typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));
#define UNROLLED _Pragma("GCC unroll 32") for

static inline Vector load(const float* at) { return *reinterpret_cast<const Vector*>(at); }
static inline void store(float* at, Vector value) { *reinterpret_cast<Vector*>(at) = value; }
constexpr long least(long a, long b) { return a < b ? a : b; }

// The largest divisor of a number that does not exceed a limit.
constexpr long part(long number, long most) {
  long found = 1;
  for (long divisor = 1; divisor <= most; ++divisor) found = number % divisor ? found : divisor;
  return found;
}

constexpr long ROW = WIDTH * EXAMPLES, PLANE = HEIGHT * ROW;
static_assert(EXAMPLES >= LANES, "too few examples");

#if OUT

constexpr long LINES = HEIGHT + 2 * ABOVE - TALL + 1;
constexpr long OUT_ROW = (WIDTH - WIDE + 1) * EXAMPLES, OUT_PLANE = LINES * OUT_ROW;
constexpr long TAPS = TALL * WIDE * IN;

// The kernel rows that overlap the image at output line y.
static inline long first_row(long y) { return y < ABOVE ? ABOVE - y : 0; }
static inline long last_row(long y) { return least(TALL, HEIGHT + ABOVE - y); }

// Three quarters of the registers hold sums: CHANNELS channels of ACROSS vectors each.
constexpr long CHANNELS = part(OUT, REGISTERS / 4);
constexpr long ACROSS = least(REGISTERS * 3 / 4 / CHANNELS, OUT_ROW / LANES), STEP = ACROSS * LANES;

// out[o, y, x, e] = bias[o] + sum over ky, kx, i of weight[o, ky, kx, i] * image[i, y + ky - ABOVE, x + kx, e]
extern "C" void convolve(const float* image, const float* weight, const float* bias, float* out) {
  for (long y = 0; y < LINES; ++y)
    for (long o = 0; o < OUT; o += CHANNELS)
      for (long from = 0; from < OUT_ROW; from += STEP) {
        const long j = least(from, OUT_ROW - STEP);  // the end of a row may be computed twice
        Vector sums[CHANNELS][ACROSS];
        UNROLLED(long c = 0; c < CHANNELS; ++c)
          UNROLLED(long v = 0; v < ACROSS; ++v) sums[c][v] = bias[o + c] - Vector{};
        for (long ky = first_row(y); ky < last_row(y); ++ky)
          for (long kx = 0; kx < WIDE; ++kx)
            for (long i = 0; i < IN; ++i) {
              const float* at = image + i * PLANE + (y + ky - ABOVE) * ROW + kx * EXAMPLES + j;
              const float* factor = weight + o * TAPS + (ky * WIDE + kx) * IN + i;
              Vector read[ACROSS];
              UNROLLED(long v = 0; v < ACROSS; ++v) read[v] = load(at + v * LANES);
              UNROLLED(long c = 0; c < CHANNELS; ++c)
                UNROLLED(long v = 0; v < ACROSS; ++v) sums[c][v] += read[v] * factor[c * TAPS];
            }
        float* to = out + o * OUT_PLANE + y * OUT_ROW + j;
        UNROLLED(long c = 0; c < CHANNELS; ++c)
          UNROLLED(long v = 0; v < ACROSS; ++v) store(to + c * OUT_PLANE + v * LANES, sums[c][v]);
      }
}

// Registers hold the sums of one kernel row for TOGETHER channels.
constexpr long TOGETHER = part(OUT, REGISTERS - 2 > WIDE ? (REGISTERS - 2) / WIDE : 1);

static inline float total(Vector lanes) {
  float sum = 0;
  for (long lane = 0; lane < LANES; ++lane) sum += lanes[lane];
  return sum;
}

// weight[o, ky, kx, i] = sum over y, x, e of gradient[o, y, x, e] * image[i, y + ky - ABOVE, x + kx, e]
// bias[o] = sum of gradient[o]
extern "C" void weigh(const float* image, const float* gradient, float* weight, float* bias) {
  static thread_local Vector sums[OUT / TOGETHER][TALL][IN][TOGETHER][WIDE], totals[OUT];
  __builtin_memset(sums, 0, sizeof sums);
  __builtin_memset(totals, 0, sizeof totals);
  Vector fresh;  // 1 in the lanes of a row's last vector that the previous vector does not cover, otherwise 0
  for (long lane = 0; lane < LANES; ++lane) fresh[lane] = lane >= LANES - OUT_ROW % LANES;
  for (long y = 0; y < LINES; ++y)
    for (long o = 0; o < OUT; o += TOGETHER) {
      const float* down = gradient + o * OUT_PLANE + y * OUT_ROW;
      for (long ky = first_row(y); ky < last_row(y); ++ky)
        for (long i = 0; i < IN; ++i) {
          const float* at = image + i * PLANE + (y + ky - ABOVE) * ROW;
          auto& kept = sums[o / TOGETHER][ky][i];
          Vector here[TOGETHER][WIDE];
          UNROLLED(long t = 0; t < TOGETHER; ++t) UNROLLED(long kx = 0; kx < WIDE; ++kx) here[t][kx] = kept[t][kx];
          for (long from = 0; from < OUT_ROW; from += LANES) {
            const long j = least(from, OUT_ROW - LANES);
            Vector read[WIDE];
            UNROLLED(long kx = 0; kx < WIDE; ++kx) read[kx] = load(at + kx * EXAMPLES + j);
            if (j < from) UNROLLED(long kx = 0; kx < WIDE; ++kx) read[kx] *= fresh;
            UNROLLED(long t = 0; t < TOGETHER; ++t) {
              const Vector slope = load(down + t * OUT_PLANE + j);
              UNROLLED(long kx = 0; kx < WIDE; ++kx) here[t][kx] += read[kx] * slope;
            }
          }
          UNROLLED(long t = 0; t < TOGETHER; ++t) UNROLLED(long kx = 0; kx < WIDE; ++kx) kept[t][kx] = here[t][kx];
        }
      for (long t = 0; t < TOGETHER; ++t)
        for (long from = 0; from < OUT_ROW; from += LANES) {
          const long j = least(from, OUT_ROW - LANES);
          const Vector slope = load(down + t * OUT_PLANE + j);
          totals[o + t] += j < from ? slope * fresh : slope;
        }
    }
  for (long o = 0; o < OUT; ++o) {
    bias[o] = total(totals[o]);
    for (long ky = 0; ky < TALL; ++ky)
      for (long kx = 0; kx < WIDE; ++kx)
        for (long i = 0; i < IN; ++i) *weight++ = total(sums[o / TOGETHER][ky][i][o % TOGETHER][kx]);
  }
}

#else

// Gradient of max-pooling with a stride equal to the window: all of it goes to each window's first maximum.
extern "C" void unpool(const float* image, const float* gradient, float* out) {
  for (long i = 0; i < IN; ++i)
    for (long y = 0; y < HEIGHT / TALL; ++y)
      for (long x = 0; x < WIDTH / WIDE; ++x, gradient += EXAMPLES)
        for (long from = 0; from < EXAMPLES; from += LANES) {
          const long e = least(from, EXAMPLES - LANES), corner = i * PLANE + y * TALL * ROW + x * WIDE * EXAMPLES + e;
          Vector read[TALL * WIDE], rest = load(gradient + e);
          UNROLLED(long w = 0; w < TALL * WIDE; ++w)
            read[w] = load(image + corner + w / WIDE * ROW + w % WIDE * EXAMPLES);
          Vector largest = read[0];
          UNROLLED(long w = 1; w < TALL * WIDE; ++w) largest = read[w] > largest ? read[w] : largest;
          UNROLLED(long w = 0; w < TALL * WIDE; ++w) {
            const auto hit = read[w] == largest;
            store(out + corner + w / WIDE * ROW + w % WIDE * EXAMPLES, hit ? rest : Vector{});
            rest = hit ? Vector{} : rest;
          }
        }
}

#endif
