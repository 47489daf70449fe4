/* Loops for images, audio and video that NumPy or Pillow cannot run in one pass: see meshfeed/native/loops.c, whose
   rules they keep. */

#include <stdint.h>
#include <string.h>
#include "../native/heap.h"

/* -- pixels of images: see meshfeed/processors/pixels.py --------------------------------------------------- */

/* Replace bytes by values: of each of `num_rows` rows 3 channels of `size` bytes, each by its own 256 values,
   and write every channel `copies` times, one copy after the other. */
int64_t mf_widen_pixels(int64_t num_rows, int64_t size, int64_t copies, const uint8_t *pixels,
                        const float *values, float *restrict out)
{
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t channel = 0; channel < 3; channel++, pixels += size) {
            const float *of_byte = values + 256 * channel, *first = out;
            for (int64_t i = 0; i < size; i++)
                out[i] = of_byte[pixels[i]];
            for (int64_t copy = 1; copy < copies; copy++)
                memcpy(out + copy * size, first, (size_t)size * sizeof *out);
            out += copies * size;
        }
    return num_rows;
}

/* -- resizing of images: see meshfeed/processors/pixels.py -------------------------------------------------- */

/* These loops are compiled twice for x86: whole numbers are the same at any vector width. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif
#define INLINE static inline __attribute__((always_inline))

enum { WEIGHT_BITS = 22, HALF = 1 << (WEIGHT_BITS - 1), TOGETHER = 32 };
typedef int32_t pixel __attribute__((vector_size(16), aligned(4), may_alias)); /* red, green, blue, none */

/* A table has a row for each new pixel of a line: the first of the old ones that it is made of, and the weight
   of each, in units of 2^-WEIGHT_BITS. */

static inline uint8_t byte_of(int32_t sum)
{
    sum >>= WEIGHT_BITS;
    sum = sum > 0 ? sum : 0;
    return (uint8_t)(sum < 255 ? sum : 255);
}

INLINE void weigh(const pixel *old, int64_t size, int64_t taps, const int32_t *table, pixel *restrict sums)
{
    for (int64_t x = 0; x < size; x++, table += 1 + taps) {
        const pixel *from = old + table[0];
        pixel sum = {HALF, HALF, HALF, HALF};
        for (int64_t t = 0; t < taps; t++)
            sum += from[t] * table[1 + t];
        sums[x] = sum;
    }
}

/* Resize a line of `width` pixels of 4 bytes to `size` pixels. room: for width + size pixels. */
WIDE static void resize_line(int64_t width, const uint8_t *restrict line, int64_t size, int64_t taps,
                             const int32_t *restrict table, int32_t *restrict room, uint8_t *restrict out)
{
    int32_t *sums = room + 4 * width;
    for (int64_t i = 0; i < 4 * width; i++)
        room[i] = line[i];
    switch (taps) { /* those of images that hardly change their size, unrolled */
    case 4: weigh((pixel *)room, size, 4, table, (pixel *)sums); break;
    case 5: weigh((pixel *)room, size, 5, table, (pixel *)sums); break;
    case 6: weigh((pixel *)room, size, 6, table, (pixel *)sums); break;
    default: weigh((pixel *)room, size, taps, table, (pixel *)sums);
    }
    for (int64_t i = 0; i < 4 * size; i++)
        out[i] = byte_of(sums[i]);
}

INLINE void weigh_bytes(int count, const uint8_t *from, int64_t stride, int64_t taps, const int32_t *weights,
                        uint8_t *restrict out)
{
    int32_t sums[TOGETHER];
    for (int i = 0; i < count; i++)
        sums[i] = HALF;
    for (int64_t t = 0; t < taps; t++, from += stride)
        for (int i = 0; i < count; i++)
            sums[i] += from[i] * weights[t];
    for (int i = 0; i < count; i++)
        out[i] = byte_of(sums[i]);
}

/* Make a line of `stride` bytes, a multiple of 4, of several. row: of a table. */
WIDE static void merge_lines(const uint8_t *lines, int64_t stride, int64_t taps, const int32_t *row,
                             uint8_t *restrict out)
{
    int64_t at = 0;
    lines += row[0] * stride;
    for (; at + TOGETHER <= stride; at += TOGETHER)
        weigh_bytes(TOGETHER, lines + at, stride, taps, row + 1, out + at);
    for (; at < stride; at += 4)
        weigh_bytes(4, lines + at, stride, taps, row + 1, out + at);
}

/* Bytes 0, 1 and 2 of each pixel, each in a line of its own. */
WIDE static void part_channels(const uint8_t *restrict line, int64_t width, uint8_t *restrict out)
{
    for (int64_t x = 0; x < width; x++) {
        out[x] = line[4 * x];
        out[width + x] = line[4 * x + 1];
        out[2 * width + x] = line[4 * x + 2];
    }
}

/* Resize an image of lines of `width` pixels of 4 bytes, and write it in squares of `side` x `side` bytes for
   each of 3 channels; merge x merge squares follow each other.

   lines_first: whether lines are resized before they are merged. merges: a table of `height` rows;
   across: one of `new_width`. room: for width + new_width pixels of int32; lines: for 7 * new_width bytes and
   the larger of 4 * width and, if lines are first, 4 * new_width for each old line. Returns the height. */
int64_t mf_resize_squares(int64_t width, const uint8_t *pixels, int64_t lines_first,
                          int64_t height, int64_t merge_taps, const int32_t *merges,
                          int64_t new_width, int64_t taps, const int32_t *across,
                          int64_t side, int64_t merge, int32_t *room, uint8_t *lines, uint8_t *out)
{
    int64_t columns = new_width / side, resized = merges[0];
    uint8_t *channels = lines, *line = channels + 3 * new_width, *rest = line + 4 * new_width;
    for (int64_t y = 0; y < height; y++, merges += 1 + merge_taps) {
        if (lines_first) {
            for (; resized < merges[0] + merge_taps; resized++)
                resize_line(width, pixels + 4 * width * resized, new_width, taps, across, room,
                            rest + 4 * new_width * resized);
            merge_lines(rest, 4 * new_width, merge_taps, merges, line);
        } else {
            merge_lines(pixels, 4 * width, merge_taps, merges, rest);
            resize_line(width, rest, new_width, taps, across, room, line);
        }
        part_channels(line, new_width, channels);
        int64_t row = y / side, begin = (row / merge * columns + row % merge) * merge;
        for (int64_t column = 0; column < columns; column++) {
            int64_t square = begin + column / merge * merge * merge + column % merge;
            for (int64_t channel = 0; channel < 3; channel++)
                memcpy(out + ((3 * square + channel) * side + y % side) * side,
                       channels + channel * new_width + column * side, (size_t)side);
        }
    }
    return height;
}

/* -- plans for encoders: see meshfeed/multimodal/encoders. ------------------------------------------------ */

/* Give each piece of work to the least loaded rank of its pool: `share` of multimodal/encoders/assign.py.

   order: the pieces, as they are given. first, size: of the pool of each; pools are the same or apart. Writes `rank`.
   ranks: 0 and a rank for each rank, ascending. */
int64_t mf_share(int64_t num_pieces, const int64_t *order, const int64_t *first, const int64_t *size,
                 const double *work, int64_t *rank, entry *ranks)
{
    for (int64_t i = 0; i < num_pieces; i++) {
        int64_t piece = order[i];
        entry *pool = ranks + first[piece], least = pool[0];
        rank[piece] = least.group;
        least.key = key_of(number_of(least.key) + work[piece]);
        replace_first(pool, size[piece], least);
    }
    return num_pieces;
}
static double larger(double a, double b) { return a > b ? a : b; }

enum { MOST_COSTS = 4, MOST_CHOSEN = 8, MOST_CHOICES = 1 + MOST_CHOSEN * (MOST_CHOSEN + 1) / 2 };

/* What the packs of a step hold: `Contents` of multimodal/encoders/balance.py. Its cost and padded have num_columns. */
typedef struct {
    int64_t num_costs, num_sizes, num_columns, num_packs, stride;
    const double *cost;
    const int64_t *padded, *size_at;
    int64_t *free, *slots, *members, *counts;
    double *excess;
} contents;

/* None, each one and each two of a pack's sequences, and what they are on a group of its own size, then on one
   of the other pack's: `Choices` of multimodal/encoders/balance.py. */
typedef struct {
    int64_t num, size[MOST_CHOICES], items[MOST_CHOICES][2], padded[2][MOST_CHOICES];
    double cost[2][MOST_COSTS][MOST_CHOICES];
} choices;

static void choose(const contents *of, int64_t pack, int64_t other, choices *made)
{
    const int64_t *members = of->members + pack * of->stride;
    int64_t count = of->counts[pack], num = count < MOST_CHOSEN ? count : MOST_CHOSEN;
    made->num = 1 + num + num * (num - 1) / 2;
    for (int64_t i = 0; i <= num; i++) {
        made->size[i] = i > 0;
        made->items[i][0] = i ? members[(i - 1) * count / num] : -1;
        made->items[i][1] = -1;
    }
    for (int64_t i = 1, at = num + 1; i <= num; i++)
        for (int64_t j = i + 1; j <= num; j++, at++) {
            made->size[at] = 2;
            made->items[at][0] = made->items[i][0];
            made->items[at][1] = made->items[j][0];
        }
    for (int64_t k = 0; k < 2; k++) {
        int64_t size_at = of->size_at[k ? other : pack], *padded = made->padded[k];
        padded[0] = 0;
        for (int64_t i = 1; i <= num; i++)
            padded[i] = of->padded[size_at * of->num_columns + made->items[i][0]];
        for (int64_t i = 1, at = num + 1; i <= num; i++)
            for (int64_t j = i + 1; j <= num; j++, at++)
                padded[at] = padded[i] + padded[j];
        for (int64_t c = 0; c < of->num_costs; c++) {
            const double *each = of->cost + (c * of->num_sizes + size_at) * of->num_columns;
            double *cost = made->cost[k][c];
            cost[0] = 0;
            for (int64_t i = 1; i <= num; i++)
                cost[i] = each[made->items[i][0]];
            for (int64_t i = 1, at = num + 1; i <= num; i++)
                for (int64_t j = i + 1; j <= num; j++, at++)
                    cost[at] = cost[i] + cost[j];
        }
    }
}

/* The first swap of packs p and q that leaves at most `enough`, or else the one that leaves least: `_best_swap`
   of multimodal/encoders/balance.py. Returns the larger excess of both, or `below` where no swap leaves less. */
WIDE static double best_swap(const contents *of, int64_t at, int64_t p, int64_t q, const choices *gives,
                             const choices *takes, double enough, double below, int64_t *given, int64_t *taken)
{
    for (int64_t a = 0; a < gives->num; a++) {
        double excess[MOST_CHOICES];
        /* where that is not less, nothing that is taken helps */
        if (of->excess[at * of->num_packs + p] - gives->cost[0][at][a] >= below)
            continue;
        for (int64_t c = 0; c < of->num_costs; c++) { /* all that is taken at once, without a jump */
            const double *now = of->excess + c * of->num_packs, *mine = takes->cost[0][c], *yours = takes->cost[1][c];
            double p_left = now[p] - gives->cost[0][c][a], q_more = gives->cost[1][c][a], q_now = now[q];
            for (int64_t b = 0; b < takes->num; b++) {
                double most = larger(p_left + yours[b], q_now - mine[b] + q_more);
                excess[b] = c ? larger(excess[b], most) : most;
            }
        }
        int64_t num_less = 0;
        for (int64_t b = 0; b < takes->num; b++)
            num_less += excess[b] < below;
        for (int64_t b = 0; num_less && b < takes->num; b++) {
            int64_t more = takes->size[b] - gives->size[a];
            if (excess[b] >= below || of->free[p] + gives->padded[0][a] < takes->padded[1][b]
                || of->free[q] + takes->padded[0][b] < gives->padded[1][a]
                || of->slots[p] < more || of->slots[q] < -more)
                continue;
            below = excess[b], *given = a, *taken = b;
            if (below <= enough)
                return below;
        }
    }
    return below;
}

/* Replace what a pack gives by what it takes; its sequences stay ascending. */
static void replace_some(const contents *of, int64_t pack, const choices *gives, int64_t a,
                         const choices *takes, int64_t b)
{
    int64_t *members = of->members + pack * of->stride, num = 0;
    for (int64_t i = 0; i < of->counts[pack]; i++)
        if (members[i] != gives->items[a][0] && members[i] != gives->items[a][1])
            members[num++] = members[i];
    for (int64_t i = 0; i < takes->size[b]; i++) {
        int64_t at = num++;
        for (; at && members[at - 1] > takes->items[b][i]; at--)
            members[at] = members[at - 1];
        members[at] = takes->items[b][i];
    }
    of->slots[pack] -= num - of->counts[pack];
    of->counts[pack] = num;
    of->free[pack] += gives->padded[0][a] - takes->padded[1][b];
    for (int64_t c = 0; c < of->num_costs; c++) {
        double *now = of->excess + c * of->num_packs + pack;
        *now = *now - gives->cost[0][c][a] + takes->cost[1][c][b];
    }
}

/* Let packs swap sequences until no excess is above the tolerance, or no more help: `swap` of multimodal/encoders/balance.py.

   bounds: most sweeps, tries, one in how many packs must swap for another sweep; limits: tolerance, least
   gain, what part of a difference is enough. Changes free, slots, excess, members and counts.
   lowest, heaps: room for [costs, num_packs]; above: for num_packs. Returns how many swaps were made. */
int64_t mf_swap(const int64_t *bounds, const double *limits, int64_t num_costs, int64_t num_sizes,
                int64_t num_columns, const double *cost, const int64_t *padded,
                int64_t num_packs, const int64_t *size_at, int64_t *free, int64_t *slots, double *excess,
                int64_t stride, int64_t *members, int64_t *counts,
                int64_t *lowest, entry *heaps, entry *above)
{
    contents of = {num_costs, num_sizes, num_columns, num_packs, stride, cost, padded,
                   size_at, free, slots, members, counts, excess};
    choices room[3], *gives = room, *takes = room + 1, *best = room + 2;
    int64_t num_swaps = 0, before = -1, num_above = 0;
    for (int64_t sweep = 0; sweep < bounds[0] && (num_swaps - before) * bounds[2] > num_above; sweep++) {
        int64_t num_left = 0, num_sorted[MOST_COSTS] = {0}, num_heap[MOST_COSTS] = {0}, turns[MOST_COSTS];
        before = num_swaps;
        for (int64_t p = 0; p < num_packs; p++) {
            double worst = excess[p];
            for (int64_t c = 0; c < num_costs; c++) {
                worst = larger(worst, excess[c * num_packs + p]);
                push(heaps + c * num_packs, &num_heap[c], (entry){key_of(excess[c * num_packs + p]), p});
                turns[c] = sweep * bounds[1];
            }
            if (worst > limits[0])
                push(above, &num_left, (entry){key_of(-worst), p});
        }
        num_above = num_left;
        while (num_left) {
            int64_t p = pop(above, &num_left).group, at = 0, with = -1, a = 0, b = 0, given = 0, taken = 0;
            for (int64_t c = 1; c < num_costs; c++)
                if (excess[c * num_packs + p] > excess[at * num_packs + p])
                    at = c;
            double now = excess[at * num_packs + p], least = now - limits[1], enough = now;
            if (now <= limits[0])
                continue;
            int64_t first = turns[at]++, size = -1, *sorted = lowest + at * num_packs;
            int64_t end = first + (bounds[1] < num_packs ? bounds[1] : num_packs);
            for (int64_t t = first; t < end && (with < 0 || least > enough); t++) {
                while (num_sorted[at] <= t % num_packs)
                    sorted[num_sorted[at]++] = pop(heaps + at * num_packs, &num_heap[at]).group;
                int64_t q = sorted[t % num_packs];
                if (q == p || excess[at * num_packs + q] >= now)
                    continue;
                if (size_at[q] != size)
                    choose(&of, p, q, gives);
                size = size_at[q];
                choose(&of, q, p, takes);
                enough = larger(limits[0], now - limits[2] * (now - excess[at * num_packs + q]));
                double found = best_swap(&of, at, p, q, gives, takes, enough, least, &a, &b);
                if (found >= least)
                    continue;
                choices *spare = best;
                best = takes, takes = spare, least = found, with = q, given = a, taken = b;
            }
            if (with < 0)
                continue;
            if (size_at[with] != size)
                choose(&of, p, with, gives);
            replace_some(&of, p, gives, given, best, taken);
            replace_some(&of, with, best, taken, gives, given);
            num_swaps++;
        }
    }
    return num_swaps;
}
