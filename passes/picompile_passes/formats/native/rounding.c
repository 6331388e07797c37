/* Rows of weights, rounded to the codes of a format and packed as `Codec` describes.

   Each group gets the scale, and the zero or minimum, that leave the least squared error, in which a weight counts by
   its magnitude and that of its group: of a few that span the group, and a little less or more, each with the scale and
   minimum of least squares for the codes that it gives. K-quants of GGML are made in this way.

   Sixteen groups lie in the lanes of vectors, weight by weight. Vectors are GCC's own. Nothing is contracted but by
   `fused`, and nothing is reassociated, so that the same weights give the same bytes on every machine. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint8_t Bytes __attribute__((vector_size(16)));

enum { LANES = 16, MOST_WEIGHTS = 32, BLOCK = 256, HALF = 16, MOST_PLANES = 2 };
enum { FLOAT16 = 1, E8M0 = 2, IN_BLOCKS = 3, SIXTEENTHS = 4 }; /* types of scales, minima and zeros */
enum { GIVEN_FLOAT32, GIVEN_FLOAT16, GIVEN_BFLOAT16 };         /* types of the weights that are given */

/* A format, and where the parts of a row of `columns` weights lie; compiled.py has the same fields. */
typedef struct {
    int64_t columns, row_bytes, zero_offset, scale_offset, factor_offset;
    int32_t bits, group, planes, plane_bits[MOST_PLANES], lowest, highest, scale, shift, steps;
    float zero;
} Format;

static Floats splat(float x) { return x - (Floats){0}; }
static Floats choose(Ints mask, Floats a, Floats b) { return (Floats)((mask & (Ints)a) | (~mask & (Ints)b)); }
static Floats magnitude(Floats a) { return (Floats)((Ints)a & 0x7FFFFFFF); }

/* 1.5 · 2^23, to which a number is added, leaves it no bit behind the point; ties go to the even number. */
static const float ROUND = 12582912.0f;

static Floats nearest(Floats x) { return (x + splat(ROUND)) - splat(ROUND); }

#ifdef __AVX512F__
static Floats least(Floats a, Floats b) { return (Floats)_mm512_min_ps((__m512)a, (__m512)b); }
static Floats most(Floats a, Floats b) { return (Floats)_mm512_max_ps((__m512)a, (__m512)b); }
static Floats fused(Floats a, Floats b, Floats c) { return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }

/* Turn sixteen vectors so that lane i of vector j is lane j of vector i. */
static void turn_square(Floats *m) {
    Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int half = 1; half < LANES; half *= 2) {
        Ints is_high = (lane & half) != 0, low = lane + (is_high & (LANES - half)), high = lane + half + (is_high & (LANES - half));
        for (int i = 0; i < LANES; i++)
            if (!(i & half)) {
                Floats a = m[i], b = m[i + half];
                m[i] = __builtin_shuffle(a, b, low), m[i + half] = __builtin_shuffle(a, b, high);
            }
    }
}
#else
static void turn_square(Floats *m) {
    float turned[LANES][LANES];
    for (int i = 0; i < LANES; i++)
        for (int lane = 0; lane < LANES; lane++) turned[i][lane] = m[lane][i];
    memcpy(m, turned, sizeof turned);
}

#if defined(__AVX2__) && defined(__FMA__)
/* GCC makes scalar code of the loops below, where a vector takes two registers. */
typedef union { Floats whole; __m256 half[2]; } Halves;

static Floats least(Floats a, Floats b) {
    Halves x = {a}, y = {b};
    for (int i = 0; i < 2; i++) x.half[i] = _mm256_min_ps(x.half[i], y.half[i]);
    return x.whole;
}

static Floats most(Floats a, Floats b) {
    Halves x = {a}, y = {b};
    for (int i = 0; i < 2; i++) x.half[i] = _mm256_max_ps(x.half[i], y.half[i]);
    return x.whole;
}

static Floats fused(Floats a, Floats b, Floats c) {
    Halves x = {a}, y = {b}, z = {c};
    for (int i = 0; i < 2; i++) x.half[i] = _mm256_fmadd_ps(x.half[i], y.half[i], z.half[i]);
    return x.whole;
}
#else
static Floats least(Floats a, Floats b) {
    for (int lane = 0; lane < LANES; lane++) a[lane] = a[lane] < b[lane] ? a[lane] : b[lane];
    return a;
}

static Floats most(Floats a, Floats b) {
    for (int lane = 0; lane < LANES; lane++) a[lane] = a[lane] > b[lane] ? a[lane] : b[lane];
    return a;
}

static Floats fused(Floats a, Floats b, Floats c) {
    for (int lane = 0; lane < LANES; lane++) a[lane] = fmaf(a[lane], b[lane], c[lane]);
    return a;
}
#endif
#endif

static Floats root(Floats a) {
    for (int lane = 0; lane < LANES; lane++) a[lane] = sqrtf(a[lane]);
    return a;
}

/* float16, rounded to nearest even; what is beyond its range becomes its largest number. */
static uint16_t to_half(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7FFFFFFF;
    if (rest > 0x7F800000) return 0x7E00;
    if (rest >= 0x477FF000) return (uint16_t)(sign | 0x7BFF);
    if (rest < 0x38800000) {
        float small;
        memcpy(&small, &rest, 4);
        small += 0.5f;
        memcpy(&rest, &small, 4);
        return (uint16_t)(sign | (rest - 0x3F000000));
    }
    rest += 0xC8000FFF + (rest >> 13 & 1);
    return (uint16_t)(sign | rest >> 13);
}

static float of_half(uint16_t half) {
    uint32_t rest = half & 0x7FFF, bits = (rest << 13) + 0x38000000;
    float value;
    memcpy(&value, &bits, 4);
    if (rest < 0x400) value = (float)rest * 5.9604644775390625e-8f;
    return half & 0x8000 ? -value : value;
}

static float as_half(float value) { return of_half(to_half(value)); }
static float inverse_of(float scale) { return scale == 0 ? 0 : 1 / scale; }
static float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

/* A candidate has to leave an error that is smaller by so much of Σ w x². Else the span itself stays, which is exact
   where weights lie on its grid. */
static const float WORTH = 1e-6f;

/* How many codes a candidate's span is longer than that of its group. */
static float stretch(const Format *f, int step) { return f->steps ? 2.0f * (float)step / (float)f->steps - 1 : 0; }

/* Σ w code, Σ w code² and Σ w code x of the codes of a candidate. */
typedef struct { Floats l, l2, xl; } Sums;

/* The sums of two candidates at a time, whose codes are `from` times `inverse`, rounded, at most `high` and, where
   `has_low`, at least `low`. */
static inline __attribute__((always_inline)) void sum_codes(int group, const Floats *from, const Floats *x, const Floats *w,
                                                            const Floats *inverse, int has_low, Floats low, Floats high,
                                                            Sums *sums) {
    Sums a = {splat(0), splat(0), splat(0)}, b = a;
    for (int i = 0; i < group; i++) {
        Floats codes = least(fused(from[i], inverse[0], splat(ROUND)) - splat(ROUND), high);
        Floats others = least(fused(from[i], inverse[1], splat(ROUND)) - splat(ROUND), high);
        if (has_low) codes = most(codes, low), others = most(others, low);
        Floats weighted = w[i] * codes, also = w[i] * others;
        a.l += weighted, a.l2 = fused(weighted, codes, a.l2), a.xl = fused(weighted, x[i], a.xl);
        b.l += also, b.l2 = fused(also, others, b.l2), b.xl = fused(also, x[i], b.xl);
    }
    sums[0] = a, sums[1] = b;
}

/* Scales and minima of sixteen groups, whose weights are `x`, and how much each of them counts, `w`. */
static void fit_both(const Format *f, const Floats *x, const Floats *w, Floats *scale, Floats *minimum) {
    Ints is_below = (Ints){0} - (f->shift != FLOAT16); /* only these have no minima above 0 */
    Floats above[MOST_WEIGHTS];
    Sums sums[2];
    Floats lo = x[0], hi = x[0], sw = splat(0), sx = splat(0), sx2 = splat(0), top = splat((float)f->highest);
    for (int i = 0; i < f->group; i++) {
        lo = least(lo, x[i]), hi = most(hi, x[i]);
        Floats product = w[i] * x[i];
        sw += w[i], sx += product, sx2 += product * x[i];
    }
    if (f->shift != FLOAT16) lo = least(lo, splat(0));
    if (f->shift == SIXTEENTHS) hi = most(hi, splat(0)); /* zeros lie between the first code and the last */
    Floats span = hi - lo, least_error = splat(0);
    Ints is_wide = span > 0;
    *scale = choose(is_wide, span, splat(0)) / top, *minimum = lo;
    Floats of_span = 1 / choose(is_wide, span, splat(1));
    for (int i = 0; i < f->group; i++) {
        above[i] = x[i] - lo;
        Floats off = nearest(above[i] * (top * of_span)) * *scale + lo - x[i];
        least_error += w[i] * off * off;
    }
    for (int step = 0; step <= f->steps; step++) {
        if (step % 2 == 0) {
            Floats inverse[] = {(top + stretch(f, step)) * of_span, (top + stretch(f, step + 1)) * of_span};
            sum_codes(f->group, above, x, w, inverse, 0, splat(0), top, sums);
        }
        Floats sl = sums[step % 2].l, sl2 = sums[step % 2].l2, sxl = sums[step % 2].xl;
        Floats determinant = sw * sl2 - sl * sl, of_zero = sl2 * sx - sl * sxl;
        Ints is_line = (determinant > 0) & is_wide, is_above = is_below & (of_zero > 0);
        /* A minimum above 0 becomes 0, and the scale is that of least squares through it. */
        Floats inverse = 1 / choose(is_line, choose(is_above, sl2, determinant), splat(1));
        Floats of_codes = choose(is_above, sxl, sw * sxl - sx * sl) * inverse;
        Floats at_zero = choose(is_above, splat(0), of_zero * inverse);
        Floats error = sx2 + of_codes * (of_codes * sl2 - 2 * sxl) + at_zero * (at_zero * sw - 2 * sx + 2 * of_codes * sl);
        Ints is_better = is_line & (error < least_error - WORTH * sx2);
        least_error = choose(is_better, error, least_error);
        *scale = choose(is_better, of_codes, *scale), *minimum = choose(is_better, at_zero, *minimum);
    }
}

static Floats fit_scale(const Format *f, const Floats *x, const Floats *w) {
    Floats lo = x[0], hi = x[0], low = splat((float)f->lowest - f->zero), high = splat((float)f->highest - f->zero);
    for (int i = 1; i < f->group; i++) lo = least(lo, x[i]), hi = most(hi, x[i]);
    Floats extreme = choose(hi > -lo, hi, lo);
    Ints is_some = extreme != 0;
    /* The code furthest from 0 is the extreme's, whatever its sign; where both ends are as far, its sign stays. */
    Floats end = -low[0] > high[0] ? low : choose(extreme > 0, high, -high), most_kept;
    Floats best = choose(is_some, extreme / end, splat(0)), divisor = choose(is_some, extreme, splat(1));
    Floats per_code = 1 / divisor, inverse = end * per_code, sx2 = splat(0), kept = splat(0);
    Sums sums[2];
    for (int i = 0; i < f->group; i++) {
        Floats value = least(most(nearest(x[i] * inverse), low), high) * best, product = w[i] * x[i];
        sx2 += product * x[i], kept += value * (2 * product - w[i] * value);
    }
    most_kept = kept;
    for (int step = 0; f->steps && step <= f->steps; step++) {
        if (step % 2 == 0) {
            Floats longer = splat(stretch(f, step)), longest = splat(stretch(f, step + 1));
            Floats inverses[] = {(end + choose(end < 0, -longer, longer)) * per_code,
                                 (end + choose(end < 0, -longest, longest)) * per_code};
            sum_codes(f->group, x, x, w, inverses, 1, low, high, sums);
        }
        Floats sl2 = sums[step % 2].l2, sxl = sums[step % 2].xl;
        Ints is_better = (sl2 > 0) & is_some & (sxl * sxl > (most_kept + WORTH * sx2) * sl2);
        Floats scale = sxl / choose(is_better, sl2, splat(1));
        most_kept = choose(is_better, sxl * scale, most_kept), best = choose(is_better, scale, best);
    }
    return best;
}

/* The grids of the groups of a row, rounded to what the format can hold of them. `whole` and `below` are the whole
   numbers of scales and of minima or zeros, `factors` what a block's are multiples of, those of minima behind all. */
typedef struct {
    float *scale, *minimum, *factors;
    int16_t *whole, *below;
    uint8_t *codes;
} Row;

static void store_blocks(const Format *f, int64_t groups, float *values, int16_t *whole, float *factors, float end) {
    int64_t together = BLOCK / f->group;
    for (int64_t block = 0; block * together < groups; block++) {
        int64_t first = block * together, last = first + together < groups ? first + together : groups;
        float extreme = 0;
        for (int64_t g = first; g < last; g++)
            if (fabsf(values[g]) > fabsf(extreme)) extreme = values[g];
        factors[block] = as_half(extreme / end);
        float inverse = inverse_of(factors[block]), low = end == 255 ? 0 : -end;
        for (int64_t g = first; g < last; g++) {
            whole[g] = (int16_t)clamp(rintf(values[g] * inverse), low, end);
            values[g] = (float)whole[g] * factors[block];
        }
    }
}

/* Fit groups `first` … of a row, sixteen of them, or those that are left. */
static void fit_groups(const Format *f, const float *x, Row *row, int64_t first, int64_t groups) {
    Floats values[MOST_WEIGHTS], weights[MOST_WEIGHTS], square = splat(0), scale, minimum = splat(0);
    for (int part = 0; part < f->group / LANES; part++) {
        for (int lane = 0; lane < LANES; lane++) {
            int64_t group = first + lane < groups ? first + lane : groups - 1;
            memcpy(values + part * LANES + lane, x + group * f->group + part * LANES, sizeof(Floats));
        }
        turn_square(values + part * LANES);
    }
    for (int i = 0; i < f->group; i++) square += values[i] * values[i];
    Floats size = root(square / (float)f->group);
    for (int i = 0; i < f->group; i++) weights[i] = size + magnitude(values[i]);
    if (f->shift) fit_both(f, values, weights, &scale, &minimum);
    else scale = fit_scale(f, values, weights);
    for (int lane = 0; lane < LANES && first + lane < groups; lane++)
        row->scale[first + lane] = scale[lane], row->minimum[first + lane] = minimum[lane];
}

static void round_row(const Format *f, const float *x, Row *row) {
    int64_t groups = f->columns / f->group, blocks = (f->columns + BLOCK - 1) / BLOCK;
    for (int64_t g = 0; g < groups; g += LANES) fit_groups(f, x, row, g, groups);
    if (f->scale == IN_BLOCKS) store_blocks(f, groups, row->scale, row->whole, row->factors, 127);
    else for (int64_t g = 0; g < groups; g++) row->scale[g] = as_half(row->scale[g]);
    if (f->shift == IN_BLOCKS) store_blocks(f, groups, row->minimum, row->below, row->factors + blocks, 255);
    for (int64_t g = 0; g < groups; g++) {
        float inverse = inverse_of(row->scale[g]);
        if (f->shift == FLOAT16) row->minimum[g] = as_half(row->minimum[g]);
        if (f->shift == SIXTEENTHS) {
            row->below[g] = (int16_t)clamp(rintf(-row->minimum[g] * inverse * 16), 0, 255);
            row->minimum[g] = -(float)row->below[g] / 16 * row->scale[g];
        }
        for (int64_t i = g * f->group; i < (g + 1) * f->group; i += LANES) {
            Floats values;
            memcpy(&values, x + i, sizeof values);
            Floats codes = nearest((values - row->minimum[g]) * inverse + f->zero);
            codes = least(most(codes, splat((float)f->lowest)), splat((float)f->highest));
            Bytes bytes = __builtin_convertvector(__builtin_convertvector(codes, Ints), Bytes);
            memcpy(row->codes + i, &bytes, sizeof bytes);
        }
    }
}

static void put_half(uint8_t *place, float value) {
    uint16_t half = to_half(value);
    memcpy(place, &half, 2);
}

static void put_scales(int32_t kind, int64_t groups, const float *values, const int16_t *whole, uint8_t *place) {
    for (int64_t g = 0; g < groups; g++) {
        uint32_t bits;
        memcpy(&bits, values + g, 4);
        if (kind == FLOAT16) put_half(place + 2 * g, values[g]);
        else place[g] = kind == E8M0 ? (uint8_t)(bits >> 23) : (uint8_t)whole[g];
    }
}

/* Write the bytes of a row. Codes of a plane lie as `Plane` says. */
static void pack_row(const Format *f, const Row *row, uint8_t *packed) {
    int64_t groups = f->columns / f->group, blocks = (f->columns + BLOCK - 1) / BLOCK;
    uint8_t *data = packed;
    memset(packed, 0, (size_t)f->row_bytes);
    if (f->bits == 8) memcpy(packed, row->codes, (size_t)f->columns);
    for (int plane = 0, shift = 0; f->bits < 8 && plane < f->planes; shift += f->plane_bits[plane++]) {
        int bits = f->plane_bits[plane], mask = (1 << bits) - 1, together = 8 / bits;
        for (int64_t g = 0; g < f->columns / (2 * HALF); g++) {
            uint8_t *place = data + g / together * (2 * HALF) + g % 2 * HALF;
            const uint8_t *codes = row->codes + g * 2 * HALF;
            int at = (int)(g / 2 % (together / 2)) * 2 * bits;
            Bytes low, high, stored;
            memcpy(&low, codes, sizeof low), memcpy(&high, codes + HALF, sizeof high);
            memcpy(&stored, place, sizeof stored);
            stored |= ((low >> shift) & (uint8_t)mask) << at | ((high >> shift) & (uint8_t)mask) << (at + bits);
            memcpy(place, &stored, sizeof stored);
        }
        int64_t whole = (f->columns / (2 * HALF) + together - 1) / together * together;
        data += bits == 4 ? f->columns / 2 : whole * 2 * HALF * bits / 8;
    }
    if (f->shift == SIXTEENTHS) put_scales(IN_BLOCKS, groups, row->minimum, row->below, packed + f->zero_offset);
    else if (f->shift) put_scales(f->shift, groups, row->minimum, row->below, packed + f->zero_offset);
    put_scales(f->scale, groups, row->scale, row->whole, packed + f->scale_offset);
    int64_t factors = blocks * ((f->scale == IN_BLOCKS) + (f->shift == IN_BLOCKS));
    for (int64_t i = 0; i < factors; i++) put_half(packed + f->factor_offset + 2 * i, row->factors[i]);
}

/* Read weights `first` … of `given`, which are of type `kind`, as float32. */
static void read_weights(int32_t kind, const void *given, int64_t first, int64_t count, float *out) {
    if (kind == GIVEN_FLOAT32) {
        memcpy(out, (const float *)given + first, (size_t)count * sizeof(float));
        return;
    }
    const uint16_t *halves = (const uint16_t *)given + first;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)halves[i] << 16;
        if (kind == GIVEN_FLOAT16) {
            /* Exponents of float32 are 112 more, those of numbers below the least normal one too. */
            float value;
            bits = (uint32_t)(halves[i] & 0x7FFF) << 13;
            memcpy(&value, &bits, 4);
            value *= 0x1p112f;
            memcpy(&bits, &value, 4);
            bits = (halves[i] & 0x7C00) == 0x7C00 ? bits | 0x7F800000 : bits;
            bits |= (uint32_t)(halves[i] & 0x8000) << 16;
        }
        memcpy(out + i, &bits, 4);
    }
}

/* Round rows of `given` weights of type `kind` each, which are padded with zeros, and pack them. Return 0 where memory
   is short. */
int pi_round_rows(const Format *f, const void *x, int32_t kind, int64_t rows, int64_t given, uint8_t *packed) {
    int64_t groups = f->columns / f->group, blocks = (f->columns + BLOCK - 1) / BLOCK;
    float *padded = calloc((size_t)(f->columns + 2 * groups + 2 * blocks), sizeof(float));
    int16_t *whole = calloc((size_t)(2 * groups), sizeof(int16_t));
    uint8_t *codes = malloc((size_t)f->columns);
    if (padded && whole && codes) {
        float *scale = padded + f->columns;
        Row row = {scale, scale + groups, scale + 2 * groups, whole, whole + groups, codes};
        for (int64_t r = 0; r < rows; r++) {
            read_weights(kind, x, r * given, given, padded);
            round_row(f, padded, &row);
            pack_row(f, &row, packed + r * f->row_bytes);
        }
    }
    int done = padded && whole && codes;
    free(padded), free(whole), free(codes);
    return done;
}

/* Pack rows of codes whose scales and minima are known, those in blocks by their whole numbers and factors. */
void pi_pack_rows(const Format *f, const uint8_t *codes, int64_t rows, float *scale, float *minimum, int16_t *whole,
                  int16_t *below, float *factors, uint8_t *packed) {
    int64_t groups = f->columns / f->group, blocks = (f->columns + BLOCK - 1) / BLOCK;
    for (int64_t r = 0; r < rows; r++) {
        Row row = {scale + r * groups, minimum + r * groups, factors + 2 * r * blocks, whole + r * groups,
                   below + r * groups, (uint8_t *)codes + r * f->columns};
        pack_row(f, &row, packed + r * f->row_bytes);
    }
}

#define TURN(SIZE)                                                                                                     \
    for (int64_t u = 0; u < (end - start) / SIZE; u++)                                                                 \
        for (int64_t r = 0; r < rows; r++) memcpy(to + (u * rows + r) * SIZE, from + r * row_bytes + u * SIZE, SIZE)

/* Lay panels of `rows` rows out: where a row has `unit` bytes of a part, from byte `start` to `end`, a panel has those
   of all its rows side by side. */
void pi_turn_part(const uint8_t *packed, int64_t panels, int64_t rows, int64_t row_bytes, int64_t panel_bytes,
                  int64_t start, int64_t end, int64_t unit, uint8_t *out) {
    for (int64_t p = 0; p < panels; p++) {
        const uint8_t *from = packed + p * rows * row_bytes + start;
        uint8_t *to = out + p * panel_bytes + rows * start;
        if (unit == 4) TURN(4);
        else if (unit == 2) TURN(2);
        else TURN(1);
    }
}
