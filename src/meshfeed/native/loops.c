/* Loops of meshfeed that NumPy cannot run in one pass.

   C11 with the vectors of GCC and Clang, against libc. Python calls each function once per portion, without
   the interpreter lock; the module that calls it also holds a version in NumPy with the same bits, which runs
   where nothing is compiled.
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
#include "heap.h"

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
