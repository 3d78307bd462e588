/* A golden vector without Python: reads one array of a safetensors file, makes it again from its design, and compares.
 *
 *     cc -O2 -o read_vectors read_vectors.c -lm
 *     ./read_vectors softmax/tiny.safetensors q normal 1 softmax.tiny.q
 *
 * The arguments are FILE NAME DESIGN NUMBERS STREAM, as the manifest has them: NUMBERS are those of the design with
 * commas between, in the order of docs/vectors.md, which specifies everything that is done here.
 * The exit code is 0 where every number is the same, 1 where one is not, and 2 otherwise. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void fail(const char *why) {
    fprintf(stderr, "read_vectors: %s\n", why);
    exit(2);
}

static uint32_t crc32(const char *text, uint32_t before) { /* the CRC-32 of zlib, of a text after another one */
    uint32_t crc = ~before;
    for (; *text; text++) {
        crc ^= (unsigned char)*text;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
    }
    return ~crc;
}

static uint32_t word(uint64_t i, uint32_t purpose) { /* word i of a stream with seed, step and layer 0: Philox4x32-10 */
    uint32_t c[4] = {(uint32_t)(i / 4), purpose, 0, 0}, key[2] = {0, 0};
    for (int round = 0; round < 10; round++) {
        uint64_t p = (uint64_t)0xD2511F53u * c[0], q = (uint64_t)0xCD9E8D57u * c[2];
        uint32_t c1 = c[1], c3 = c[3];
        c[0] = (uint32_t)(q >> 32) ^ c1 ^ key[0], c[1] = (uint32_t)q;
        c[2] = (uint32_t)(p >> 32) ^ c3 ^ key[1], c[3] = (uint32_t)p;
        key[0] += 0x9E3779B9u, key[1] += 0xBB67AE85u;
    }
    return c[i % 4];
}

static double uniform(uint64_t e, uint32_t purpose) { return (double)(word(e, purpose) >> 8) * ldexp(1.0, -24); }

static double to_bfloat16(double x) { /* the nearest number with 8 significant bits, ties to even */
    int exponent;
    if (x == 0.0) return x;
    frexp(x, &exponent);
    double step = ldexp(1.0, (exponent - 1 < -126 ? -126 : exponent - 1) - 7);
    return rint(x / step) * step;
}

/* Element e of an array whose last axes are heads, rows and the width of these, from this many numbers. */
static double made(uint64_t e, const char *design, const double *n, int many, const uint64_t *shape, uint32_t purpose) {
    uint64_t heads = shape[0], rows = shape[1], width = shape[2];
    uint64_t row = e / width % rows, head = e / width / rows % heads;
    uint64_t w = word(e, purpose), span = (uint64_t)(int64_t)(n[1] - n[0] + 1.0);
    if (!strcmp(design, "mask")) return uniform(e, purpose) < n[0];
    if (!strcmp(design, "band")) return e % width + n[0] >= row && e % width <= row + n[1];
    if (!strcmp(design, "counts")) return n[e % many];
    if (!strcmp(design, "list")) return to_bfloat16(n[e % many]);
    if (!strcmp(design, "dropout")) return uniform(e, purpose) < n[0] ? 0.0 : to_bfloat16(1.0 / (1.0 - n[0]));
    if (!strcmp(design, "biased") && uniform(e, crc32(".hidden", purpose)) < n[1]) return -INFINITY;
    if (!strcmp(design, "alibi"))
        return to_bfloat16((n[1] ? -n[1] : -exp2(-8.0 * (head + 1) / heads)) * fabs(row + n[0] - (double)(e % width)));
    if (!strcmp(design, "ranks")) return e % width ? 0.0 : n[0] * (double)(1 + row / (uint64_t)n[1]);
    if (!strcmp(design, "integers")) return n[0] + (double)(span * w >> 32);
    if (!strcmp(design, "powers")) return ldexp((2 * span * w >> 32) % 2 ? -1.0 : 1.0, (int)n[0] + (int)(span * w >> 32));
    if (!strcmp(design, "units")) return row * (uint64_t)n[0] % (uint64_t)n[1] == e % width;
    if (!strcmp(design, "burst") && row == (uint64_t)n[2]) return to_bfloat16(n[1]);
    if (!strcmp(design, "resets") && row % (uint64_t)n[1] == (uint64_t)n[1] - 1) return -INFINITY;
    if (!strcmp(design, "uniform") || !strcmp(design, "burst") || !strcmp(design, "resets")) /* the last two: up to 0 */
        return to_bfloat16((float)(n[0] + ((*design == 'u' ? n[1] : 0.0) - n[0]) * uniform(e, purpose)));
    if (!strcmp(design, "repeated")) e -= (row - row % (uint64_t)n[1]) * width;
    uint32_t first = word(2 * e, purpose), second = word(2 * e + 1, purpose);
    double x = (double)(2 * (int64_t)((first & 0xFFFF) + (first >> 16) + (second & 0xFFFF)) - 196605) * ldexp(1.0, -16);
    int moved = !strcmp(design, "shifted") && row >= n[3] && (row - (uint64_t)n[3]) % (uint64_t)n[2] == 0;
    return to_bfloat16(x * n[0] + (moved ? n[1] : 0.0));
}

int main(int argc, char **argv) {
    if (argc != 6) fail("needs FILE NAME DESIGN NUMBERS STREAM");
    int counts = !strcmp(argv[3], "counts"), many = 0, mask = !strcmp(argv[3], "mask") || !strcmp(argv[3], "band");
    double numbers[16] = {0.0, 0.0, 1.0};
    if (sscanf(argv[4], "%lf", numbers) < 1) fail("NUMBERS: needs a number");
    for (char *at = argv[4]; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        if (many < 16) numbers[many++] = strtod(at, NULL); else fail("NUMBERS: needs at most 16");
    FILE *file = fopen(argv[1], "rb");
    unsigned char size[8];
    if (!file || fseek(file, 0, SEEK_END)) fail("FILE: cannot be read");
    uint64_t length = 0, whole = (uint64_t)ftell(file);
    rewind(file);
    if (fread(size, 1, 8, file) != 8) fail("FILE: is no safetensors file");
    for (int n = 7; n >= 0; n--) length = length << 8 | size[n];
    if (length > whole - 8) fail("FILE: its header is longer than the file"); /* before anything is allocated */
    char *header = calloc(length + 1, 1), key[256];
    if (!header || fread(header, 1, length, file) != length) fail("FILE: its header cannot be read");
    snprintf(key, sizeof key, "\"%s/%s\":{", mask ? "bool" : counts ? "int64" : "float64", argv[2]);
    char *entry = strstr(header, key), *offsets = entry ? strstr(entry, "\"data_offsets\":[") : NULL;
    char *at = entry ? strstr(entry, "\"shape\":[") : NULL;
    uint64_t shape[3] = {1, 1, 1};
    for (at = at ? at + 8 : NULL; at && *at != ']'; shape[2] = strtoull(at + 1, &at, 10))
        shape[0] = shape[1], shape[1] = shape[2];
    unsigned long long first, last;
    if (!offsets || sscanf(offsets, "\"data_offsets\":[%llu,%llu]", &first, &last) != 2) fail("NAME: not there");
    if (last < first || last > whole - 8 - length) fail("FILE: an array reaches beyond its end");
    unsigned char *data = malloc(last - first + 1);
    if (!data || fseek(file, (long)(8 + length + first), SEEK_SET) || fread(data, 1, last - first, file) < last - first)
        fail("FILE: the array cannot be read");
    uint64_t count = (last - first) / (mask ? 1 : sizeof(double));
    for (uint64_t e = 0; e < count; e++) {
        double x, expected = made(e, argv[3], numbers, many, shape, crc32(argv[5], 0));
        int64_t n = data[mask ? e : 0];
        if (!mask) memcpy(counts ? (void *)&n : (void *)&x, data + 8 * e, 8); /* of a little-endian machine */
        if (mask || counts) x = (double)n;
        if (x == expected) continue;
        printf("%s: element %llu is %.17g, made %.17g\n", argv[2], (unsigned long long)e, x, expected);
        return 1;
    }
    printf("%s: %llu numbers, every bit the same\n", argv[2], (unsigned long long)count);
    return 0;
}
