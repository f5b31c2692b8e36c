// A bqsgd client in plain JavaScript, written from docs/wire.md: it reads the server's model message, encodes a vector
// with noise from WebCrypto, and makes the frame that the server takes. For browsers and for Node 20; no dependencies.
//
//     import { answer } from "./client.mjs";
//     const frame = await answer(message, (model) => clippedMeanGradient(model), {
//       client: 3, dimension: 61706, mechanism: { levels: 2, trials: 251 }, range: 1.0,
//     });
//
// It keeps no ledger. Every frame with fresh noise spends privacy, so record the spend before you call `answer`, and
// answer a round that is asked for twice with the bytes of the first time.

const MAX_LEVELS = 2 ** 20;
const MAX_TRIALS = 2 ** 20;
const MODEL_HEADER_BYTES = 32;
const FRAME_HEADER_BYTES = 80;
const CHECKSUM_BYTES = 8;
const FIXED_WIDTH = 1;
const SUBSET_FLAG = 2;
const ROUNDING_GRID = 2 ** 24;
const LONG_WORDS = new Set([61, 65, 121, 122, 129, 241, 242, 481]);

/** Something was refused and nothing was made from it; `reason` is one word for a program. */
export class Refusal extends Error {
  constructor(reason, message) {
    super(message);
    this.name = "Refusal";
    this.reason = reason;
  }
}

// ---- Parameters -----------------------------------------------------------------------------------------------------

function checkInteger(name, value, low, high) {
  if (!Number.isInteger(value) || value < low || value > high) {
    throw new Refusal("parameter", `${name} must be an integer from ${low} to ${high}, got ${String(value)}`);
  }
  return value;
}

/** A client or round number as BigInt: these fill 64 bits, a JavaScript number holds 53. */
function checkNumber64(name, value) {
  const whole = typeof value === "bigint" || Number.isSafeInteger(value);
  if (!whole || BigInt(value) !== BigInt.asUintN(64, BigInt(value))) {
    throw new Refusal("parameter", `${name} must be an integer from 0 to 2^64 - 1, got ${String(value)}`);
  }
  return BigInt(value);
}

/** Levels s, trials m and, where the codes are coarsened, points K and width W; `codeCount` is K in docs/wire.md. */
function checkMechanism({ levels, trials, coarsening = null, noise = null }) {
  // Binomial noise in the place of another law would spend another epsilon than was planned.
  if (noise !== null) throw new Refusal("law", "this client adds binomial noise alone; the mechanism names another law");
  checkInteger("levels", levels, 1, MAX_LEVELS);
  checkInteger("trials", trials, 0, MAX_TRIALS);
  const last = 2 * levels + trials;
  if (coarsening === null) return { levels, trials, points: 0, width: 0, codeCount: last + 1, step: 1 };
  const points = checkInteger("points", coarsening.points, 2, last);
  const width = checkInteger("width", coarsening.width, 1, last);
  return { levels, trials, points, width, codeCount: points, step: width / (points - 1) };
}

/** The range: one C for all coordinates, or a Float64Array with one C_j per coordinate. */
function checkRange(range, dimension) {
  const vector = range instanceof Float64Array;
  if (vector && range.length !== dimension) {
    throw new Refusal("parameter", `the range has ${range.length} entries, the vector ${dimension} coordinates`);
  }
  for (const bound of vector ? range : [range]) {
    if (!(typeof bound === "number" && bound > 2 ** -900 && bound < 2 ** 900)) {
      throw new Refusal("parameter", `a range must lie between 2^-900 and 2^900, got ${String(bound)}`);
    }
  }
  return range;
}

/** The first 16 bytes of SHA-256 over everything that both sides must agree on. */
export async function parametersDigest(mechanism, { range, dimension, kept = null }) {
  const { levels, trials, points, width } = checkMechanism(mechanism);
  const bounds = range instanceof Float64Array ? range : [range];
  const name = new TextEncoder().encode("bqsgd.parameters.v1");
  const bytes = new Uint8Array(name.length + 17 + 8 * bounds.length + (points ? 8 : 0) + (kept ? 20 : 0));
  const view = new DataView(bytes.buffer);
  bytes.set(name);
  let at = name.length;
  view.setUint32(at, levels, true);
  view.setUint32(at + 4, trials, true);
  view.setBigUint64(at + 8, BigInt(dimension), true);
  view.setUint8(at + 16, range instanceof Float64Array ? 1 : 0);
  at += 17;
  for (const bound of bounds) {
    view.setFloat64(at, bound, true);
    at += 8;
  }
  if (points) {
    view.setUint32(at, points, true);
    view.setUint32(at + 4, width, true);
    at += 8;
  }
  if (kept) {
    bytes.set(new TextEncoder().encode("kept"), at);
    writeKept(view, at + 4, kept);
  }
  return new Uint8Array(await crypto.subtle.digest("SHA-256", bytes)).slice(0, 16);
}

// ---- Subsets: one in N coordinates of the rotated vector ------------------------------------------------------------

const KEPT_BYTES = 16;
const BLOCK = 256;
const EVERYBODY = 2n ** 64n - 1n;

function writeKept(view, at, { oneIn, rotated, modelDimension }) {
  view.setUint32(at, oneIn, true);
  view.setUint32(at + 4, rotated ? 1 : 0, true);
  view.setBigUint64(at + 8, BigInt(modelDimension), true);
}

/** The AES-128-CTR keystream that is named by a round and a client's number. */
async function stream(name, round, client, count) {
  const text = new TextEncoder().encode(`bqsgd.subset.v1 ${name}`);
  const named = new Uint8Array(text.length + 16);
  named.set(text);
  new DataView(named.buffer).setBigUint64(text.length, round, true);
  new DataView(named.buffer).setBigUint64(text.length + 8, client, true);
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", named));
  const key = await crypto.subtle.importKey("raw", digest.slice(0, 16), "AES-CTR", false, ["encrypt"]);
  const settings = { name: "AES-CTR", counter: new Uint8Array(16), length: 128 };
  return new Uint8Array(await crypto.subtle.encrypt(settings, key, new Uint8Array(count)));
}

/**
 * The coordinates that a client's message carries in a round; `client` null for a subset that all clients share.
 * `shapes` are those of the trained tensors; `rotated` is true for clips that bound a Euclidean norm.
 */
export async function drawSubset({ shapes, oneIn, rotated }, { round, client }) {
  if (!(Number.isInteger(oneIn) && oneIn >= 2 && oneIn <= 2 ** 16)) {
    throw new Refusal("parameter", `oneIn must be an integer from 2 to 65536, got ${String(oneIn)}`);
  }
  const matrices = shapes.map((shape) => {
    const size = shape.reduce((product, length) => product * length, 1);
    const rows = shape.length > 1 ? shape[0] : 1;
    return { rows, columns: size / rows };
  });
  const dimension = matrices.reduce((sum, { rows, columns }) => sum + rows * columns, 0);
  const number = checkNumber64("round", round);
  const signBytes = matrices.map(({ columns }) => Math.ceil(columns / 8)); // each tensor begins with a new byte
  const bits = await stream("signs", number, EVERYBODY, signBytes.reduce((sum, count) => sum + count, 0));
  let at = 0;
  matrices.forEach((matrix, n) => {
    const own = bits.subarray(at, at + signBytes[n]);
    matrix.signs = Float32Array.from({ length: matrix.columns }, (_, j) => 1 - 2 * ((own[j >> 3] >> (j & 7)) & 1));
    at += signBytes[n];
  });
  const count = Math.ceil(dimension / oneIn);
  const sender = client === null ? EVERYBODY : checkNumber64("client", client);
  const words = new DataView((await stream("places", number, sender, 4 * count)).buffer);
  const places = Uint32Array.from({ length: count }, (_, n) => {
    const size = Math.min(oneIn, dimension - n * oneIn);
    return n * oneIn + Math.floor((words.getUint32(4 * n, true) * size) / 2 ** 32); // below 2^48, so exact
  });
  return { matrices, places, kept: { oneIn, rotated, modelDimension: dimension } };
}

/** Walsh-Hadamard transform of x[at .. at + size), in place. */
function transform(x, at, size) {
  for (let apart = size / 2; apart >= 1; apart /= 2) {
    for (let start = at; start < at + size; start += 2 * apart) {
      for (let i = start; i < start + apart; i += 1) [x[i], x[i + apart]] = [x[i] + x[i + apart], x[i] - x[i + apart]];
    }
  }
  for (let i = at; i < at + size; i += 1) x[i] /= Math.sqrt(size);
}

/** The kept coordinates of one sample's flat gradient. Clip them (a norm C to C / sqrt(oneIn)), then add up. */
export function keepPart(gradient, { matrices, places, kept }) {
  if (gradient.length !== kept.modelDimension) {
    throw new Refusal("dimension", `the subset is one of ${kept.modelDimension} coordinates, got ${gradient.length}`);
  }
  const whole = Float64Array.from(gradient);
  let first = 0;
  for (const { rows, columns, signs } of kept.rotated ? matrices : []) {
    const block = Math.min(BLOCK, 2 ** Math.floor(Math.log2(columns)));
    for (let row = first; row < first + rows * columns; row += columns) {
      for (let j = 0; j < columns; j += 1) whole[row + j] *= signs[j];
      for (let at = 0; at + block <= columns; at += block) transform(whole, row + at, block);
      if (columns % block) transform(whole, row + columns - block, block);
    }
    first += rows * columns;
  }
  return Float64Array.from(places, (place) => whole[place]);
}

// ---- Checksum: XXH3, 64 bits, seed 0, default secret ----------------------------------------------------------------

const PRIME32 = [0x9e3779b1n, 0x85ebca77n, 0xc2b2ae3dn];
const PRIME64 = [
  0x9e3779b185ebca87n, 0xc2b2ae3d27d4eb4fn, 0x165667b19e3779f9n, 0x85ebca77c2b2ae63n, 0x27d4eb2f165667c5n,
];
const PRIME_AVALANCHE = 0x165667919e3779f9n;
const SECRET = new DataView(
  Uint8Array.from(
    (
      "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f" +
      "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c" +
      "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8" +
      "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364" +
      "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e" +
      "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ).match(/../g),
    (byte) => parseInt(byte, 16),
  ).buffer,
);
const LOW32 = 0xffffffffn;
const u64 = (value) => BigInt.asUintN(64, value);

/** Both halves of a 128-bit product, one on the other. */
function fold(a, b) {
  const product = a * b;
  return u64(product) ^ (product >> 64n);
}

function avalanche(hash) {
  const mixed = u64((hash ^ (hash >> 37n)) * PRIME_AVALANCHE);
  return mixed ^ (mixed >> 32n);
}

/** The checksum of `bytes` as a BigInt. No message has less than 17: what XXH3 does with fewer is left out. */
export function xxh3(bytes) {
  const data = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const length = bytes.byteLength;
  if (length < 17) throw new Refusal("length", `a checksum is over at least 17 bytes, got ${length}`);
  const word = (at) => data.getBigUint64(at, true);
  const secret = (at) => SECRET.getBigUint64(at, true);
  const mix = (at, from) => fold(word(at) ^ secret(from), word(at + 8) ^ secret(from + 8));
  const start = u64(BigInt(length) * PRIME64[0]);
  if (length <= 128) {
    let hash = start;
    for (let i = 0; i < Math.ceil(length / 32); i += 1) {
      hash += mix(16 * i, 32 * i) + mix(length - 16 * (i + 1), 32 * i + 16);
    }
    return avalanche(u64(hash));
  }
  if (length <= 240) {
    let hash = start;
    for (let i = 0; i < 8; i += 1) hash += mix(16 * i, 16 * i);
    hash = avalanche(u64(hash));
    for (let i = 8; i < Math.floor(length / 16); i += 1) hash += mix(16 * i, 16 * (i - 8) + 3);
    return avalanche(u64(hash + mix(length - 16, 119)));
  }
  const lanes = BigUint64Array.of(
    PRIME32[2], PRIME64[0], PRIME64[1], PRIME64[2], PRIME64[3], PRIME32[1], PRIME64[4], PRIME32[0],
  );
  const accumulate = (at, from) => {
    for (let i = 0; i < 8; i += 1) {
      const value = word(at + 8 * i);
      const keyed = value ^ secret(from + 8 * i);
      lanes[i ^ 1] += value;
      lanes[i] += (keyed & LOW32) * (keyed >> 32n);
    }
  };
  const stripes = Math.floor((length - 1) / 64); // sixteen stripes of 64 bytes make a block
  for (let stripe = 0; stripe < stripes; stripe += 1) {
    accumulate(64 * stripe, 8 * (stripe % 16));
    if (stripe % 16 === 15) {
      for (let i = 0; i < 8; i += 1) {
        lanes[i] = (lanes[i] ^ (lanes[i] >> 47n) ^ secret(128 + 8 * i)) * PRIME32[0];
      }
    }
  }
  accumulate(length - 64, 121);
  let hash = start;
  for (let i = 0; i < 8; i += 2) hash += fold(lanes[i] ^ secret(11 + 8 * i), lanes[i + 1] ^ secret(19 + 8 * i));
  return avalanche(u64(hash));
}

/** The checksum of a message whose header ends with the checksum: of all bytes but those eight. */
function checksumOf(message, headerBytes) {
  const checked = new Uint8Array(message.length - CHECKSUM_BYTES);
  checked.set(message.subarray(0, headerBytes - CHECKSUM_BYTES));
  checked.set(message.subarray(headerBytes), headerBytes - CHECKSUM_BYTES);
  return xxh3(checked);
}

// ---- The model message ----------------------------------------------------------------------------------------------

/**
 * The round (BigInt) and the model (Float32Array, a copy) of a message, checked whole before any of it is used.
 * `dimension` is the client's own; a message of another one is refused.
 */
export function readModel(message, { dimension }) {
  checkInteger("dimension", dimension, 1, Number.MAX_SAFE_INTEGER);
  if (!(message instanceof Uint8Array)) throw new Refusal("parameter", "a model message must be a Uint8Array");
  if (message.length < MODEL_HEADER_BYTES) {
    throw new Refusal("length", `a model message has at least ${MODEL_HEADER_BYTES} bytes, got ${message.length}`);
  }
  const view = new DataView(message.buffer, message.byteOffset, message.byteLength);
  if (String.fromCharCode(...message.subarray(0, 4)) !== "BQSM") throw new Refusal("magic", "not a model message");
  const version = view.getUint16(4, true);
  if (version !== 1) throw new Refusal("version", `this client knows version 1 of the model message, got ${version}`);
  const dtype = view.getUint16(6, true);
  if (dtype !== 1 && dtype !== 2) throw new Refusal("dtype", `values must be of dtype 1 or 2 (float32), got ${dtype}`);
  const stated = view.getBigUint64(16, true);
  if (stated !== BigInt(dimension)) {
    throw new Refusal("dimension", `this client's model has ${dimension} coordinates, the message ${stated}`);
  }
  const expected = MODEL_HEADER_BYTES + 4 * dimension;
  // With dtype 2 the memory of the server's optimizer follows. This client repeats no steps, so it does not need it.
  const memory = message.length - expected;
  const fits = dtype === 1 ? memory === 0 : memory > 0 && memory % 8 === 0 && memory <= 8 * (2 * dimension + 1);
  if (!fits) {
    throw new Refusal("length", `${dimension} coordinates take ${expected} bytes, got ${message.length}`);
  }
  if (checksumOf(message, MODEL_HEADER_BYTES) !== view.getBigUint64(24, true)) {
    throw new Refusal("checksum", "the model message was damaged in transit: wrong checksum");
  }
  const round = view.getBigUint64(8, true);
  if (round >= 2n ** 63n) throw new Refusal("round", `round must be below 2^63, got ${round}`);
  const model = new Float32Array(dimension);
  for (let j = 0; j < dimension; j += 1) model[j] = view.getFloat32(MODEL_HEADER_BYTES + 4 * j, true);
  if (!model.every(Number.isFinite)) throw new Refusal("not-finite", "the model message holds NaN or infinity");
  return { round, model };
}

// ---- From values to codes -------------------------------------------------------------------------------------------

/** Random bits of the operating system, through WebCrypto; each word is handed out once. */
class Draws {
  #words = new Uint32Array(16384); // 65,536 bytes, the most that one call may ask for
  #used = 16384;

  word() {
    if (this.#used === this.#words.length) {
      crypto.getRandomValues(this.#words);
      this.#used = 0;
    }
    return this.#words[this.#used++];
  }

  /** Exactly Bin(trials, 1/2): how many of `trials` fair bits are one. */
  binomial(trials) {
    let ones = 0;
    for (let left = trials; left > 0; left -= 32) ones += countOnes(this.word() >>> Math.max(32 - left, 0));
    return ones;
  }

  /** Exactly uniform in {0, ..., count - 1}: words beyond the last whole multiple are drawn again. */
  below(count) {
    const limit = 2 ** 32 - (2 ** 32 % count);
    let word = this.word();
    while (word >= limit) word = this.word();
    return word % count;
  }
}

function countOnes(word) {
  const pairs = word - ((word >>> 1) & 0x55555555);
  const fours = (pairs & 0x33333333) + ((pairs >>> 2) & 0x33333333);
  return Math.imul((fours + (fours >>> 4)) & 0x0f0f0f0f, 0x01010101) >>> 24;
}

/**
 * The noised codes of a Float32Array or Float64Array. Values beyond the range are cut to it; NaN and infinity are
 * refused, before any noise is drawn: make them zeros, sample by sample, before you clip.
 */
export function encode(values, mechanism, range) {
  const { levels, trials, points, width } = checkMechanism(mechanism);
  if (!(values instanceof Float32Array || values instanceof Float64Array) || values.length === 0) {
    throw new Refusal("parameter", "values must be a Float32Array or Float64Array with at least one coordinate");
  }
  const inputs = new Float64Array(values); // a copy: what was checked is what is encoded
  checkRange(range, inputs.length);
  const spoilt = inputs.findIndex((value) => !Number.isFinite(value));
  if (spoilt >= 0) throw new Refusal("not-finite", `values[${spoilt}] is NaN or infinite`);
  const draws = new Draws();
  const codes = new Uint32Array(inputs.length);
  const scale = levels * ROUNDING_GRID;
  const shift = scale + 0.5;
  const perUnit = range instanceof Float64Array ? null : scale / range;
  for (let j = 0; j < inputs.length; j += 1) {
    const bound = perUnit === null ? range[j] : range;
    const value = Math.min(Math.max(inputs[j], -bound), bound);
    const scaled = perUnit === null ? (value / bound) * scale : value * perUnit;
    const place = Math.floor(scaled + shift); // in steps of 2^-24 codes
    const draw = draws.word() >>> 8;
    // Adding 2^24 - 1 - draw carries into the next code exactly when draw < the fraction of `place`.
    const rounded = Math.floor((place + (ROUNDING_GRID - 1 - draw)) / ROUNDING_GRID);
    const noised = rounded + draws.binomial(trials);
    codes[j] = points ? coarsen(noised, 2 * levels + trials, points, width, draws) : noised;
  }
  return codes;
}

/** One of the points for a noised code, without bias inside the window; reads nothing but the noised code. */
function coarsen(code, last, points, width, draws) {
  const place = Math.min(Math.max(2 * code - last + width, 0), 2 * width) * (points - 1); // in 1 / (2 width) points
  const rest = place % (2 * width);
  return (place - rest) / (2 * width) + (draws.below(2 * width) < rest ? 1 : 0);
}

/** The values that codes stand for, in the order of operations of docs/wire.md: equal to the server's, bit for bit. */
export function decode(codes, mechanism, range) {
  const { levels, codeCount, step } = checkMechanism(mechanism);
  checkRange(range, codes.length);
  const centre = (codeCount - 1) / 2;
  if (range instanceof Float64Array) {
    const perBound = (1 / levels) * step;
    return Float64Array.from(codes, (code, j) => perBound * range[j] * (code - centre));
  }
  const unit = (range / levels) * step;
  return Float64Array.from(codes, (code) => unit * (code - centre));
}

// ---- From codes to a frame ------------------------------------------------------------------------------------------

const bitLength = (value) => (value === 0n ? 0 : value.toString(2).length);

/** How K codes are packed: groups of `digits` codes, a word of `wordBits`, then `lowBits` raw bits per code. */
export function layout(codeCount) {
  const width = bitLength(BigInt(codeCount) - 1n);
  let best = { lowBits: width, base: 1, digits: 1, wordBits: 0 };
  if (1n << BigInt(1000 * width) <= BigInt(codeCount) ** 1009n) return best;
  const longest = LONG_WORDS.has(codeCount) ? 124 : 62;
  const half = 1n << BigInt(longest / 2);
  const groupBits = ({ lowBits, digits, wordBits }) => digits * lowBits + wordBits;
  for (let lowBits = width - 1; lowBits >= 0; lowBits -= 1) {
    const base = Math.ceil(codeCount / 2 ** lowBits);
    for (let digits = 1; BigInt(base) ** BigInt(Math.ceil(digits / 2)) <= half; digits += 1) {
      const wordBits = bitLength(BigInt(base) ** BigInt(digits) - 1n);
      if (wordBits > longest) break;
      const found = { lowBits, base, digits, wordBits };
      const fewer = groupBits(found) * best.digits - groupBits(best) * digits;
      if (fewer < 0 || (fewer === 0 && digits < best.digits)) best = found;
    }
  }
  return best;
}

/** The fixed-width payload of codes below `codeCount`. */
export function pack(codes, codeCount) {
  const { lowBits, base, digits, wordBits } = layout(codeCount);
  const rest = codes.length % digits;
  const bits = Math.floor(codes.length / digits) * (digits * lowBits + wordBits);
  const payload = new Uint8Array(Math.ceil((bits + (rest ? wordBits + rest * lowBits : 0)) / 8));
  let at = 0;
  let held = 0;
  let fill = 0;
  const put = (value, width) => {
    held |= value << fill; // at most 7 bits are held and at most 22 come
    for (fill += width; fill >= 8; fill -= 8) {
      payload[at++] = held;
      held >>>= 8;
    }
  };
  for (let start = 0; start < codes.length; start += digits) {
    const group = codes.subarray(start, start + digits);
    if (wordBits) {
      let word = group.reduceRight((sum, code) => sum * BigInt(base) + BigInt(code >>> lowBits), 0n);
      for (let left = wordBits; left > 0; left -= 16) {
        put(Number(word & 0xffffn), Math.min(left, 16));
        word >>= 16n;
      }
    }
    for (const code of group) put(code & (2 ** lowBits - 1), lowBits);
  }
  if (fill) payload[at] = held;
  return payload;
}

/** The frame of a vector of codes, coded at fixed width. Its noise came from WebCrypto: the seeded flag is 0. */
export async function writeFrame(codes, { client, round, mechanism, range, kept = null }) {
  const { levels, trials, points, width, codeCount } = checkMechanism(mechanism);
  if (!(codes instanceof Uint32Array) || codes.length === 0 || !codes.every((code) => code < codeCount)) {
    throw new Refusal("code", `codes must be a Uint32Array of at least one code, each below ${codeCount}`);
  }
  const sender = checkNumber64("client", client);
  const number = checkNumber64("round", round);
  const digest = await parametersDigest(mechanism, {
    range: checkRange(range, codes.length),
    dimension: codes.length,
    kept,
  });
  const payload = pack(codes, codeCount);
  const start = FRAME_HEADER_BYTES + (kept ? KEPT_BYTES : 0);
  const frame = new Uint8Array(start + payload.length);
  const view = new DataView(frame.buffer);
  frame.set(new TextEncoder().encode("BQSG"));
  view.setUint16(4, 1, true);
  view.setUint8(6, FIXED_WIDTH);
  view.setUint8(7, kept ? SUBSET_FLAG : 0);
  frame.set(digest, 8);
  view.setBigUint64(24, sender, true);
  view.setBigUint64(32, number, true);
  view.setBigUint64(40, BigInt(codes.length), true);
  view.setUint32(48, levels, true);
  view.setUint32(52, trials, true);
  view.setBigUint64(56, BigInt(payload.length), true);
  view.setUint32(64, points, true);
  view.setUint32(68, width, true);
  if (kept) writeKept(view, FRAME_HEADER_BYTES, kept);
  frame.set(payload, start);
  view.setBigUint64(72, checksumOf(frame, FRAME_HEADER_BYTES), true);
  return frame;
}

/**
 * Answer one model message: `update(model, round, subset)` gives the vector to send, already clipped sample by sample.
 * With `subsets` ({ shapes, oneIn, rotated }) the vector has the coordinates of `subset` alone: see `keepPart`.
 * A message or vector that is refused throws a Refusal; tell the server that you decline, never why.
 */
export async function answer(message, update, { client, dimension, mechanism, range, subsets = null }) {
  const { round, model } = readModel(message, { dimension });
  const subset = subsets && (await drawSubset(subsets, { round, client }));
  const values = await update(model, round, subset);
  const wanted = subset ? subset.places.length : dimension;
  if (values.length !== wanted || (subset && subset.kept.modelDimension !== dimension)) {
    throw new Refusal("dimension", `a message of this run has ${wanted} coordinates, the update ${values.length}`);
  }
  return writeFrame(encode(values, mechanism, range), { client, round, mechanism, range, kept: subset?.kept ?? null });
}

// ---- Command line (Node) --------------------------------------------------------------------------------------------

const USAGE =
  "usage: node client.mjs --client N --levels S --trials M --range C [--points K --width W] --update FILE " +
  "[--model FILE] [--frame FILE]\nReads a model message (standard input unless --model is given) and an update " +
  "(little-endian float32), writes a frame (standard output unless --frame is given; an existing file is left alone).";

async function main() {
  const { parseArgs } = await import("node:util");
  const { readFile, writeFile } = await import("node:fs/promises");
  const names = ["client", "levels", "trials", "range", "points", "width", "update", "model", "frame"];
  const { values: given } = parseArgs({ options: Object.fromEntries(names.map((name) => [name, { type: "string" }])) });
  const number = (name, pattern = /^\d+$/) => {
    if (!pattern.test(given[name] ?? "")) throw new Refusal("parameter", `--${name} must be a number\n${USAGE}`);
    return given[name];
  };
  if (given.update === undefined) throw new Refusal("parameter", `--update is missing\n${USAGE}`);
  const mechanism = { levels: Number(number("levels")), trials: Number(number("trials")) };
  if (given.points !== undefined || given.width !== undefined) {
    mechanism.coarsening = { points: Number(number("points")), width: Number(number("width")) };
  }
  const raw = await readFile(given.update);
  if (raw.length % 4) throw new Refusal("length", "an update is float32 values, four bytes each");
  const view = new DataView(raw.buffer, raw.byteOffset, raw.byteLength);
  const update = Float32Array.from({ length: raw.length / 4 }, (_, j) => view.getFloat32(4 * j, true));
  const standardInput = async () => {
    const pieces = [];
    for await (const piece of process.stdin) pieces.push(piece);
    return Buffer.concat(pieces);
  };
  const message = given.model === undefined ? await standardInput() : await readFile(given.model);
  const frame = await answer(message, () => update, {
    client: BigInt(number("client")),
    dimension: update.length,
    mechanism,
    range: Number(number("range", /^\d*\.?\d+(e[+-]?\d+)?$/i)),
  });
  // "wx": a frame that is there already was sent perhaps, and a second one with fresh noise would be a second release.
  if (given.frame !== undefined) await writeFile(given.frame, frame, { flag: "wx" });
  else process.stdout.write(frame);
}

async function startedAsProgram() {
  if (typeof process === "undefined" || !process.versions?.node || !process.argv[1]) return false;
  const { existsSync, realpathSync } = await import("node:fs");
  const { fileURLToPath } = await import("node:url");
  return existsSync(process.argv[1]) && realpathSync(process.argv[1]) === fileURLToPath(import.meta.url);
}

if (await startedAsProgram()) {
  try {
    await main();
  } catch (error) {
    process.stderr.write(`${error.message}\n`);
    process.exitCode = 2;
  }
}
