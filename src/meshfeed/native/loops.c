/* Loops of meshfeed that NumPy cannot run in one pass.

   C11 with the vectors of GCC and Clang, against libc. Python calls each function once per portion, without
   the interpreter lock; the module that calls it also holds a version in NumPy or Pillow with the same bits,
   which runs where nothing is compiled.
   The loops that read and copy check every range: they stop at the first one outside their arrays, and
   return how many they did, so that the caller can name the rest in an error. The others take arrays that
   their callers made. No float sum may depend on vector width or fused operations: see the flags in
   hatch_build.py. */

#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

/* Whether [at, at + size) lies in [0, all). */
static int inside(int64_t at, int64_t size, int64_t all)
{
    return at >= 0 && size >= 0 && size <= all && at <= all - size;
}

/* Read each range of a table: what the system holds in memory first. The rest is asked for all at once, so that
   a disk is not asked for one range after another, and then read.

   table: [5, num_ranges]: descriptor, first byte, bytes, place in `out`, which has `room` bytes; the last row
   is zeros, and becomes 1 where a range was not in memory. Returns how many ranges were read whole; the caller
   repeats the next one, which fails or was interrupted. */
int64_t mf_read_ranges(char *out, int64_t room, int64_t num_ranges, int64_t *table)
{
    const int64_t *fds = table, *begins = fds + num_ranges, *sizes = begins + num_ranges;
    const int64_t *places = sizes + num_ranges;
    int64_t *waits = table + 4 * num_ranges, end = 0;
    for (int known = 1; end < num_ranges && inside(places[end], sizes[end], room); end++) {
#ifdef RWF_NOWAIT
        if (known) {
            struct iovec part = {out + places[end], (size_t)sizes[end]};
            errno = 0;
            if (preadv2((int)fds[end], &part, 1, begins[end], RWF_NOWAIT) == sizes[end])
                continue;
            known = errno != EOPNOTSUPP; /* some file systems cannot tell; then `will_need` has asked */
            if (known)
                posix_fadvise((int)fds[end], begins[end], sizes[end], POSIX_FADV_WILLNEED);
        }
#endif
        waits[end] = 1;
    }
    for (int64_t i = 0; i < end; i++)
        if (waits[i] && pread((int)fds[i], out + places[i], (size_t)sizes[i], begins[i]) != sizes[i])
            return i;
    return end;
}

#define WIDEN(name, type)                                                                   \
    static void name(const void *restrict from, int64_t *restrict to, int64_t size)         \
    {                                                                                       \
        const type *values = from;                                                          \
        for (int64_t i = 0; i < size; i++)                                                  \
            to[i] = values[i];                                                              \
    }
WIDEN(widen_u8, uint8_t)
WIDEN(widen_i8, int8_t)
WIDEN(widen_u16, uint16_t)
WIDEN(widen_i16, int16_t)
WIDEN(widen_u32, uint32_t)
WIDEN(widen_i32, int32_t)

static void (*const widen[])(const void *restrict, int64_t *restrict, int64_t)
    = {widen_u8, widen_i8, widen_u16, widen_i16, widen_u32, widen_i32};

/* In each row, copy `size` elements from `start` to `at`, for each of `num_runs` runs.

   kind: an index into `widen`, which makes int64 of them; -1 copies bytes. Item sizes and strides are in
   bytes, widths in elements. Returns how many runs were copied, counted over all rows. */
int64_t mf_copy_runs(int64_t kind, int64_t num_rows,
                     const char *read, int64_t read_item, int64_t read_stride, int64_t read_width,
                     char *out, int64_t out_item, int64_t out_stride, int64_t out_width,
                     int64_t num_runs, const int64_t *at, const int64_t *start, const int64_t *size)
{
    for (int64_t row = 0; row < num_rows; row++, read += read_stride, out += out_stride)
        for (int64_t i = 0; i < num_runs; i++) {
            if (!inside(at[i], size[i], out_width) || !inside(start[i], size[i], read_width))
                return row * num_runs + i;
            const char *from = read + start[i] * read_item;
            char *to = out + at[i] * out_item;
            if (kind < 0)
                memcpy(to, from, (size_t)(size[i] * out_item));
            else
                widen[kind](from, (int64_t *)to, size[i]);
        }
    return num_rows * num_runs;
}

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

/* -- resizing of images: see meshfeed/processors/resizing.py ------------------------------------------------ */

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

/* -- the order of the stream: see meshfeed/order/permutation.py ------------------------------------------- */

static uint64_t hash(uint64_t x, uint64_t key, uint64_t turn)
{
    uint64_t z = x + key + (turn + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* `permute`, or `unpermute` where `inverse`: each value x below its size goes through the network until it is
   below it again. A step is the size's (0 for one size, board and key of all, or 1), or the key's. */
int64_t mf_permute(int64_t num_values, uint64_t *values, int64_t size_step, const uint64_t *sizes,
                   const uint64_t *rows, const uint64_t *cols, int64_t key_step, const uint64_t *keys,
                   int64_t num_rounds, int64_t inverse)
{
    for (int64_t i = 0; i < num_values; i++) {
        uint64_t x = values[i], size = sizes[i * size_step], key = keys[i * key_step];
        uint64_t num_left = rows[i * size_step], num_right = cols[i * size_step];
        do {
            uint64_t left = x / num_right, right = x % num_right;
            for (int64_t turn = 0; turn < num_rounds && !inverse; turn += 2) {
                left = (left + hash(right, key, (uint64_t)turn) % num_left) % num_left;
                right = (right + hash(left, key, (uint64_t)turn + 1) % num_right) % num_right;
            }
            for (int64_t turn = num_rounds - 2; turn >= 0 && inverse; turn -= 2) {
                right = (right + num_right - hash(left, key, (uint64_t)turn + 1) % num_right) % num_right;
                left = (left + num_left - hash(right, key, (uint64_t)turn) % num_left) % num_left;
            }
            x = left * num_right + right;
        } while (x >= size);
        values[i] = x;
    }
    return num_values;
}

/* -- plans: see meshfeed/plan. The planner makes all of these arrays itself. ------------------------------ */

/* Of a heap: its least key first, of equal ones the least group. */
typedef struct {
    int64_t key, group;
} entry;

/* Keys are in the order of these numbers, but compared without a jump, in half the time. */
static int64_t key_of(double number)
{
    int64_t bits;
    number += 0.0; /* -0 is 0 */
    memcpy(&bits, &number, sizeof bits);
    return bits ^ (bits < 0 ? INT64_MAX : 0);
}

static double number_of(int64_t key)
{
    double number;
    key ^= key < 0 ? INT64_MAX : 0;
    memcpy(&number, &key, sizeof number);
    return number;
}

static int precedes(entry a, entry b)
{
#ifdef __SIZEOF_INT128__ /* two instructions */
    return ((__int128)a.key << 64 | (uint64_t)a.group) < ((__int128)b.key << 64 | (uint64_t)b.group);
#else
    return (a.key < b.key) | ((a.key == b.key) & (a.group < b.group));
#endif
}

/* Let an entry rise from a place that is free. */
static void rise(entry *heap, int64_t at, entry added)
{
    for (; at && precedes(added, heap[(at - 1) / 2]); at = (at - 1) / 2)
        heap[at] = heap[(at - 1) / 2];
    heap[at] = added;
}

static void push(entry *heap, int64_t *size, entry added) { rise(heap, (*size)++, added); }

/* Replace the first entry, mostly by one of the last: its place moves to the end of the heap first. */
static void replace_first(entry *heap, int64_t size, entry added)
{
    int64_t at = 0;
    for (int64_t child; (child = 2 * at + 1) < size; at = child) {
        child += child + 1 < size && precedes(heap[child + 1], heap[child]);
        heap[at] = heap[child];
    }
    rise(heap, at, added);
}

static entry pop(entry *heap, int64_t *size)
{
    entry first = heap[0];
    --*size;
    replace_first(heap, *size, heap[*size]);
    return first;
}

/* Give each member to the least loaded group with room for it: `place` of plan/fill.py.

   padded, load: [sizes, num_sequences]. size_at, index_of_group: indices of sizes, never ascending.
   Changes free, slots and loads; writes `group`. heaps: room for 2 * num_groups entries. */
int64_t mf_place(int64_t num_sequences, const int64_t *lengths, const int64_t *padded, const double *load,
                 int64_t num_members, const int64_t *members, const int64_t *size_at,
                 int64_t num_groups, const int64_t *index_of_group,
                 int64_t *free, int64_t *slots, double *loads, int32_t *group, entry *heaps)
{
    entry *lightest = heaps, *parked = heaps + num_groups;
    int64_t num_lightest = 0, num_parked = 0, opened = 0;
    for (int64_t m = 0; m < num_members; m++) {
        int64_t length = lengths[members[m]], chosen = -1;
        for (; opened < num_groups && index_of_group[opened] >= size_at[m]; opened++)
            if (slots[opened])
                push(lightest, &num_lightest, (entry){key_of(loads[opened]), opened});
        while (num_parked && length <= -parked[0].key) {
            int64_t back = pop(parked, &num_parked).group;
            push(lightest, &num_lightest, (entry){key_of(loads[back]), back});
        }
        while (num_lightest && chosen < 0) {
            int64_t first = lightest[0].group;
            if (free[first] >= length)
                chosen = first;
            else
                push(parked, &num_parked, (entry){-free[first], pop(lightest, &num_lightest).group});
        }
        group[m] = (int32_t)chosen;
        if (chosen < 0)
            continue;
        int64_t at = index_of_group[chosen] * num_sequences + members[m];
        free[chosen] -= padded[at];
        loads[chosen] += load[at];
        if (--slots[chosen])
            replace_first(lightest, num_lightest, (entry){key_of(loads[chosen]), chosen});
        else
            pop(lightest, &num_lightest);
    }
    return num_members;
}

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

typedef struct {
    double alpha, window, ring_tokens; /* of a CostModel; no window is 0 */
    double padding;                    /* tokens that may pad a sequence, for each rank of its group */
    double least_missing;              /* of a group that is incomplete, in parts of its goal */
} rates;

static double smaller(double a, double b) { return a < b ? a : b; }
static double larger(double a, double b) { return a > b ? a : b; }

/* CostModel.reach */
static double reach(const rates *is, double work, double size)
{
    double budget = larger(work, 0), window = is->window;
    double tokens = 2 * budget / (is->alpha + sqrt(is->alpha * is->alpha + 4 * budget));
    if (window && tokens > window)
        tokens = (budget + window * window) / (is->alpha + 2 * window);
    if (is->ring_tokens && size > 1)
        tokens = smaller(tokens, budget / (is->alpha + is->ring_tokens * size));
    return tokens * (1 + 1e-12);
}

/* The length that a group would best take next, and how many of it: Groups.wanted of plan/fill.py. */
static double wanted(const rates *is, double missing, double tokens, int64_t free, int64_t slots, double size,
                     int64_t *many)
{
    double most = smaller((double)free, reach(is, missing, size)), length = most, half = 1;
    double t = larger(tokens, 1e-9), rho = missing / t - is->alpha, window = is->window;
    if (window && rho > window)
        rho = window * window / larger(2 * window - rho, 1e-9);
    if (rho > 0 && rho < t)
        length = smaller(rho < t / 2 ? rho : (t + sqrt(larger(2 * rho * t - t * t, 0))) / 2, most);
    if (rho > 0 && rho < t / 4)
        half = smaller(t, (double)free * length / (length + is->padding * size)) / larger(2 * length, 1);
    *many = half < 1 ? 1 : half < (double)slots ? (int64_t)half : slots;
    return length;
}

/* The first of `left` from `at` on that is not taken, whose member is then ~, and at most so long. */
static int64_t first_within(const int64_t *lengths, const int64_t *left, int64_t at, int64_t num_left, double length)
{
    for (int64_t end = num_left; at < end;) {
        int64_t middle = at + (end - at) / 2, member = left[middle];
        if ((double)lengths[member < 0 ? ~member : member] > length)
            at = middle + 1;
        else
            end = middle;
    }
    while (at < num_left && left[at] < 0)
        at++;
    return at;
}

/* Let groups take sequences until each is complete or finds none that fits: `complete` of plan/fill.py.

   Changes missing, tokens, free and slots of the groups. Moves what is left to the front of `left`; writes
   what was taken, and by which group, to `members` and `group`, and returns how many. `many` and `heap` have
   room for an element of each group. */
int64_t mf_complete(const rates *is, int64_t num_sequences, const int64_t *lengths, const int64_t *padded,
                    const double *load, int64_t num_groups, const int64_t *size_at, const int64_t *sizes,
                    const double *goal, double *missing, double *tokens, int64_t *free, int64_t *slots,
                    int64_t num_left, int64_t *left, int64_t *members, int64_t *group,
                    int64_t *many, entry *heap)
{
    int64_t num_taken = 0, num_trying, kept = 0;
    for (int64_t g = 0; g < num_groups; g++)
        many[g] = 1;
    do {
        num_trying = 0;
        for (int64_t g = 0; g < num_groups; g++) {
            int open = many[g] && slots[g] > 0 && missing[g] > is->least_missing * goal[g];
            many[g] = 0;
            if (open) {
                double length = wanted(is, missing[g], tokens[g], free[g], slots[g], (double)sizes[g], &many[g]);
                push(heap, &num_trying, (entry){key_of(-length), g});
            }
        }
        /* the longest of at most that length; where several groups want the same one, the next after it */
        for (int64_t at = 0, still = num_trying; still;) {
            entry next = pop(heap, &still);
            int64_t g = next.group, got = 0;
            for (; got < many[g]; got++) {
                at = first_within(lengths, left, at, num_left, -number_of(next.key));
                if (at == num_left)
                    break;
                int64_t member = left[at], of = size_at[g] * num_sequences + member;
                missing[g] -= load[of] * (double)sizes[g];
                tokens[g] -= (double)lengths[member];
                free[g] -= padded[of];
                slots[g]--;
                members[num_taken] = member;
                group[num_taken++] = g;
                left[at++] = ~member;
            }
            many[g] = got;
        }
    } while (num_trying && num_taken < num_left);
    for (int64_t at = 0; at < num_left; at++)
        if (left[at] >= 0)
            left[kept++] = left[at];
    return num_taken;
}

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

/* -- whose turn it is: see meshfeed/order/interleave.py ---------------------------------------------------- */

enum { FRACTION_BITS = 44 }; /* _BITS */
static const int64_t ONE = (int64_t)1 << FRACTION_BITS;

/* A source's share of the first draws: whole part, and fraction in parts of ONE: `_share`. */
static int64_t share_of(uint64_t word, uint64_t draws, int64_t *fraction)
{
    uint64_t low = draws & UINT32_MAX, high = draws >> 32;
    uint64_t first = (word & UINT32_MAX) * high, second = (word >> 32) * low;
    uint64_t carried = ((word & UINT32_MAX) * low >> 32) + (first & UINT32_MAX) + (second & UINT32_MAX);
    *fraction = (int64_t)(word * draws >> (64 - FRACTION_BITS));
    return (int64_t)((word >> 32) * high + (first >> 32) + (second >> 32) + (carried >> 32));
}

static int64_t floor_of(int64_t x) { return x < 0 ? -((ONE - 1 - x) / ONE) : x / ONE; }

/* Round up the `count` likeliest of some sources, the first of equals. */
static void round_up(int64_t num, const int64_t *own, const double *likeness, int64_t count, int64_t *counts,
                     entry *heap)
{
    int64_t size = 0;
    for (int64_t i = 0; i < num; i++)
        push(heap, &size, (entry){key_of(-likeness[own[i]]), own[i]});
    while (count-- > 0)
        counts[pop(heap, &size).group]++;
}

/* The count of each source at the edge of a block: `_edge_of`.

   before, after: the counts at both parent edges, or none. groups: the sources from the rarest on; ends: of
   each group of them. most, tiny: the roundings that rarer sources may sum to, what is no fraction. Returns
   by how many the roundings miss the sum, where the caller begins anew.
   likeness, heap: room for num_sources. */
int64_t mf_edge(int64_t num_sources, const uint64_t *words, int64_t position, const int64_t *before,
                const int64_t *after, int64_t num_groups, const int64_t *groups, const int64_t *ends,
                int64_t most, int64_t tiny, int64_t *counts, double *likeness, entry *heap)
{
    int64_t total = ONE / 2, share = 0, placed = 0, begin = 0, fraction;
    for (int64_t s = 0; s < num_sources; s++) {
        counts[s] = share_of(words[s], (uint64_t)position, &fraction);
        total += fraction;
    }
    total /= ONE;
    for (int64_t g = 0; g < num_groups; begin = ends[g++]) {
        int64_t count = 0, must = 0, may = 0;
        for (int64_t i = begin; i < ends[g]; i++) {
            int64_t s = groups[i];
            int64_t whole = share_of(words[s], (uint64_t)position, &fraction), like = fraction;
            like = fraction >= ONE - tiny ? 2 * ONE : fraction <= tiny ? -ONE : fraction;
            if (before)
                like += 4 * ONE * ((before[s] > whole) - (after[s] <= whole));
            likeness[s] = (double)like;
            share += fraction;
            count += like >= ONE / 2;
            must += like >= ONE;
            may += like > 0;
        }
        int64_t least = -floor_of(most - share) - placed, largest = floor_of(share + most) - placed;
        count = count < least ? least : count;
        count = count > largest ? largest : count;
        if (g == num_groups - 1)
            count = total - placed;
        count = count < must ? must : count > may ? may : count;
        round_up(ends[g] - begin, groups + begin, likeness, count, counts, heap);
        placed += count;
    }
    return placed - total;
}

static double ceiling(double x)
{
    if (!(x < 0x1p53)) /* whole already */
        return x;
    double below = (double)(int64_t)x;
    return below < x ? below + 1 : below;
}

/* The draws of a block by deadline: `_turns_of`. Each source has `counts` of them, after `held` before it.

   slack: dates this close are equal. Writes the source of each draw, its number, and the place of each
   source's draws, source after source. Returns how many draws it has placed: all, or none if they are not as
   many, or one opens after the block.
   scratch: room for 3 * num_draws + 1; closes, heap: for num_draws. */
int64_t mf_take_turns(int64_t num_sources, const uint64_t *words, int64_t position, const int64_t *held,
                      const int64_t *counts, const double *weights, const double *slack,
                      int64_t num_draws, int32_t *source, int64_t *number, int64_t *place,
                      int64_t *scratch, double *closes, entry *heap)
{
    int64_t *first = scratch, *next = first + num_draws + 1, *numbers = next + num_draws;
    int64_t task = 0, num_ready = 0, at = 0, fraction;
    for (int64_t date = 0; date <= num_draws; date++)
        first[date] = -1;
    for (int64_t s = 0; s < num_sources; s++) {
        int64_t whole = share_of(words[s], (uint64_t)position, &fraction);
        for (int64_t k = held[s]; k < held[s] + counts[s]; k++, task++) {
            double ahead = (double)(k - whole) - (double)fraction / (double)ONE;
            double opens = larger(ahead / weights[s] + *slack, 0);
            if (task == num_draws || !(opens < (double)num_draws + 1))
                return 0;
            closes[task] = ceiling((ahead + 1) / weights[s] - *slack);
            next[task] = first[(int64_t)opens];
            first[(int64_t)opens] = task;
            numbers[task] = k;
            place[task] = s; /* until its turn */
        }
    }
    if (task < num_draws)
        return 0;
    for (int64_t now = 0; now < num_draws; now++) {
        /* if none is open yet, the next to open start early */
        for (; at <= num_draws && (at <= now || !num_ready); at++)
            for (int64_t t = first[at]; t >= 0; t = next[t])
                push(heap, &num_ready, (entry){key_of(closes[t]), at * num_draws + t});
        int64_t t = pop(heap, &num_ready).group % num_draws;
        source[now] = (int32_t)place[t];
        number[now] = numbers[t];
        place[t] = now;
    }
    return num_draws;
}

/* -- Megatron's order: see meshfeed/integrations/megatron/gpt_order.py ------------------------------------ */

/* Always the dataset that lags most behind its share, the first of equals: `_blend`, one step at a time.

   A dataset that reaches its limit is left out. Changes `shares` and `counts`; `lag` is scratch. */
int64_t mf_blend(int64_t num_datasets, double *shares, const double *limits, double *counts, double *lag,
                 int64_t num_steps, int16_t *dataset, int64_t *sample)
{
    if (num_datasets < 1)
        return 0;
    for (int64_t t = 0; t < num_steps; t++) {
        double step = t ? (double)t : 1, most[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
        int64_t i = 0, best = 0;
        for (; i + 4 <= num_datasets; i += 4) /* four maxima, so that none waits for the one before it */
            for (int k = 0; k < 4; k++) {
                lag[i + k] = shares[i + k] * step - counts[i + k];
                most[k] = larger(lag[i + k], most[k]);
            }
        for (; i < num_datasets; i++) {
            lag[i] = shares[i] * step - counts[i];
            most[0] = larger(lag[i], most[0]);
        }
        double top = larger(larger(most[0], most[1]), larger(most[2], most[3]));
        while (lag[best] < top)
            best++;
        dataset[t] = (int16_t)best;
        sample[t] = (int64_t)counts[best];
        counts[best] += 1;
        if (counts[best] >= limits[best])
            shares[best] = -INFINITY;
    }
    return num_steps;
}

/* RandomState.shuffle of NumPy. It draws ahead, so that the memory of many swaps is fetched at once.

   size: at most 2**32. next: a generator's next_uint32; its draws above `last`, masked, are not used. */
#define AHEAD 256
#define SHUFFLE(name, type)                                                                 \
    static void name(type *items, int64_t size, uint32_t (*next)(void *), void *state)      \
    {                                                                                       \
        uint32_t other[AHEAD];                                                              \
        for (int64_t last = size - 1; last > 0;) {                                          \
            int64_t count = last < AHEAD ? last : AHEAD;                                    \
            for (int64_t k = 0; k < count; k++) {                                           \
                uint32_t most = (uint32_t)(last - k), mask = UINT32_MAX >> __builtin_clz(most); \
                do                                                                          \
                    other[k] = next(state) & mask;                                          \
                while (other[k] > most);                                                    \
                __builtin_prefetch(items + other[k], 1);                                    \
            }                                                                               \
            for (int64_t k = 0; k < count; k++, last--) {                                   \
                type kept = items[last];                                                    \
                items[last] = items[other[k]];                                              \
                items[other[k]] = kept;                                                     \
            }                                                                               \
        }                                                                                   \
    }
SHUFFLE(shuffle_4, uint32_t)
SHUFFLE(shuffle_8, uint64_t)

int64_t mf_shuffle(void *items, int64_t size, int64_t item_bytes, uint32_t (*next)(void *), void *state)
{
    if (item_bytes == 4)
        shuffle_4(items, size, next, state);
    else
        shuffle_8(items, size, next, state);
    return size;
}
