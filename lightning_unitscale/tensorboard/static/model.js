// The page's data and computations, without drawing.

/** Kinds of elements for a format, in the order in which the server sends them. */
export const KINDS = ['overflow', 'subnormal', 'flushed'];
const BLOCK_KINDS = ['flushed', 'saturated', 'underflow', 'spread'];

/** The log2 RMS of all tensors of one run in one direction over its steps. */
export class RunScales {
  constructor(run, direction, header, arrays, alerts = []) {
    this.run = run;
    this.direction = direction;
    this.alerts = alerts;
    this.alertsOf = new Map();
    for (const one of alerts.filter((alert) => alert.direction === direction)) {
      this.alertsOf.set(one.tensor, [...(this.alertsOf.get(one.tensor) ?? []), one]);
    }
    this.names = header.names;
    this.modules = header.modules;
    this.sources = header.sources;
    this.operands = header.operands;
    this.steps = header.steps;
    this.position = new Map(this.names.map((name, place) => [name, place]));
    this.rms = arrays.log2_rms;
    this.units = arrays.log2_unit;
    this.unitRows = header.unit_rows;
    this.nonfinite = arrays.nonfinite;
    this.nonfiniteRows = new Map(header.nonfinite_rows.map((column, row) => [column, row]));
  }

  /** Returns the number of NaN or infinite elements, which the RMS excludes. */
  bad(column, tensor) {
    const row = this.nonfiniteRows.get(column);
    return row === undefined ? 0 : this.nonfinite[row * this.names.length + tensor];
  }

  /**
   * Returns the first tensor with a NaN or an infinity as {name, step}, or null: the one computed
   * first in the earliest such step.
   */
  firstBad() {
    const columns = [...this.nonfiniteRows.keys()];
    if (!columns.length) return null;
    const column = Math.min(...columns);
    const isBad = (_, tensor) => this.bad(column, tensor) > 0;
    const find = this.direction === 'forward' ? 'find' : 'findLast';
    return { name: this.names[find](isBad), step: this.steps[column] };
  }

  /**
   * Returns the distance of each stored operand from RMS 1 at the last step, in powers of two.
   * Tensors of zeros have no scale.
   */
  distancesFromOne() {
    const column = this.steps.length - 1;
    return this.names
      .map((_, tensor) => (this.bad(column, tensor) ? Infinity : this.value(column, tensor, true)))
      .filter((value, tensor) => this.operands[tensor] && value > -Infinity)
      .map(Math.abs);
  }

  /** Returns the alerts about a tensor, in the shown direction. */
  alertsAt(name) {
    return this.alertsOf.get(name) ?? [];
  }

  /** Returns log2 of the unit of a tensor at the `column`-th step. */
  unit(column, tensor) {
    return this.units[this.unitRows[column] * this.names.length + tensor];
  }

  /** Returns log2 RMS at the `column`-th step; -Infinity for zeros, NaN if it was absent. */
  value(column, tensor, stored) {
    const value = this.rms[column * this.names.length + tensor];
    return stored ? value : value + this.unit(column, tensor);
  }
}

/** Merges orders of names into one that keeps each of them, as far as they agree. */
export function mergeOrders(orders) {
  let merged = [];
  for (const order of orders) {
    const known = new Set(merged);
    const added = new Map();
    let previous = null;
    for (const name of order) {
      if (known.has(name)) previous = name;
      else added.set(previous, [...(added.get(previous) ?? []), name]);
    }
    merged = [null, ...merged].flatMap((name) => [name, ...(added.get(name) ?? [])]).slice(1);
  }
  return merged;
}

/**
 * Returns a test of names, which ignores case. Every word, separated by spaces or commas, must
 * occur. A word with * or ? is a glob of the whole name. A word after a ! must not match.
 */
export function nameFilter(text) {
  const words = text.toLowerCase().split(/[\s,]+/).filter((word) => word && word !== '!');
  const tests = words.map((word) => {
    const negated = word.startsWith('!');
    const pattern = negated ? word.slice(1) : word;
    let matches = (name) => name.includes(pattern);
    if (/[*?]/.test(pattern)) {
      const escaped = pattern.replace(/[.+^${}()|[\]\\]/g, '\\$&');
      const glob = new RegExp(`^${escaped.replaceAll('*', '.*').replaceAll('?', '.')}$`);
      matches = (name) => glob.test(name);
    }
    return (name) => matches(name) !== negated;
  });
  return (name) => tests.every((test) => test(name.toLowerCase()));
}

/** Returns the index of the last step that is not after `step`; 0 if all are. */
export function columnAt(steps, step) {
  let low = 0;
  let high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle + 1;
    else high = middle;
  }
  return Math.max(low - 1, 0);
}

/** Returns the steps of several runs in one order, and each run's column at every step. */
export function alignedSteps(runs) {
  const steps = [...new Set(runs.flatMap((data) => data.steps))].sort((one, other) => one - other);
  // A sample is shown until the next one of its run.
  const columnsOf = ({ steps: own }) =>
    Int32Array.from(steps, (step) => (step < own[0] || !(step <= own.at(-1)) ? -1 : columnAt(own, step)));
  return { steps, columns: runs.map(columnsOf) };
}

/** Returns the name of the run that began last. */
export function newest(runs) {
  const latest = runs.reduce((one, other) => (other.started > (one?.started ?? -1) ? other : one), null);
  return latest?.name ?? null;
}

/** Returns how many operands are near 1, in each run. */
export function headline(runs) {
  const found = runs.filter(({ operands }) => operands.some(Boolean));
  return found
    .map((data) => {
      const distances = data.distancesFromOne();
      const within = (powers) => distances.filter((distance) => distance <= powers).length;
      const what = data.direction === 'forward' ? 'operands' : 'gradients';
      const run = runs.length > 1 ? `${data.run}: ` : '';
      const step = data.steps.at(-1).toLocaleString('en');
      // Recalibration begins at a factor of 4.
      const wider = within(1) < distances.length ? `, ${within(2)} within 4×` : '';
      return `${run}${within(1)} of ${distances.length} ${what} within 2× of RMS 1${wider} at step ${step}`;
    })
    .join(' · ');
}

/** Returns a limit of the colors for 98 % of the values: 2, 4, 6, 8, then in steps of 4. */
export function colorLimit(panels, stored) {
  const magnitudes = [];
  for (const data of panels) {
    const { length } = data.rms;
    const stride = Math.max(1, Math.floor(length / 50000));
    const width = data.names.length;
    for (let place = 0; place < length; place += stride) {
      const value = data.value(Math.floor(place / width), place % width, stored);
      if (Number.isFinite(value)) magnitudes.push(Math.abs(value));
    }
  }
  if (!magnitudes.length) return 8;
  magnitudes.sort((one, other) => one - other);
  const limit = magnitudes[Math.floor(0.98 * (magnitudes.length - 1))];
  return limit <= 8 ? Math.max(2, 2 * Math.ceil(limit / 2)) : 4 * Math.ceil(limit / 4);
}

/** The exponent counts of one tensor over the steps. */
export class ExponentSeries {
  constructor(header, arrays) {
    this.steps = header.steps;
    this.firstExponent = header.first_exponent;
    this.numSampled = header.num_sampled;
    this.units = header.log2_unit;
    this.numExponents = header.steps.length ? arrays.counts.length / header.steps.length : 0;
    this.counts = arrays.counts;
  }

  /** Returns the counts at the last sampled step that is not after `step`; null without any. */
  at(step, stored) {
    if (!this.steps.length) return null;
    const row = columnAt(this.steps, step);
    const start = row * this.numExponents;
    const unit = this.units[row];
    return {
      step: this.steps[row],
      numSampled: this.numSampled[row],
      unit,
      first: this.firstExponent - (stored ? unit : 0),
      counts: this.counts.subarray(start, start + this.numExponents),
    };
  }
}

/** Returns the share of [2^exponent, 2^(exponent + 1)) below `threshold`. */
function shareBelow(threshold, exponent) {
  return Math.min(Math.max(threshold * 2 ** -exponent - 1, 0), 1);
}

/**
 * Returns the shares of the elements that a cast of 2^shift times the tensor overflows, makes
 * subnormal, flushes to zero, and leaves normal. It assumes an even spread within each binade.
 */
export function shares(format, { first, counts, numSampled }, shift) {
  let [overflow, subnormal, flushed, total] = [0, 0, 0, 0];
  counts.forEach((count, place) => {
    const exponent = first + place + shift;
    const gone = shareBelow(format.flush_threshold, exponent);
    flushed += count * gone;
    subnormal += count * (shareBelow(format.subnormal_threshold, exponent) - gone);
    overflow += count * (1 - shareBelow(format.overflow_threshold, exponent));
    total += count;
  });
  const normal = total - overflow - subnormal - flushed;
  const per = (number) => (numSampled ? number / numSampled : NaN);
  return {
    overflow: per(overflow),
    subnormal: per(subnormal),
    flushed: per(flushed),
    normal: per(normal),
  };
}

/** The out-of-range fractions of one stored tensor in the monitored formats. */
export class MonitoredFractions {
  constructor(header, arrays) {
    this.steps = header.steps;
    this.formats = header.formats;
    this.fractions = arrays.fractions;
    this.shares = header.share_read;
    this.blockFormats = header.block_formats;
    this.blocks = arrays.blocks;
  }

  /** Returns what each block format loses at exactly this step; none if no matmul read the tensor. */
  blocksAt(step) {
    const row = columnAt(this.steps, step);
    if (this.steps[row] !== step) return [];
    const found = this.blockFormats.map((name, place) => {
      const start = (row * this.blockFormats.length + place) * BLOCK_KINDS.length;
      const own = BLOCK_KINDS.map((kind, k) => [kind, this.blocks[start + k]]);
      return { name, ...Object.fromEntries(own) };
    });
    return found.filter(({ flushed }) => !Number.isNaN(flushed));
  }

  /** Returns the share of the elements behind the fractions, at a step. */
  shareRead(step) {
    const row = columnAt(this.steps, step);
    return this.steps[row] === step ? this.shares[row] : null;
  }

  /** Returns the fractions of a format at exactly this step; null if they were not measured. */
  at(step, format) {
    const row = columnAt(this.steps, step);
    const place = this.formats.indexOf(format);
    if (place < 0 || this.steps[row] !== step) return null;
    const start = (row * this.formats.length + place) * KINDS.length;
    const found = Object.fromEntries(KINDS.map((kind, k) => [kind, this.fractions[start + k]]));
    return Number.isNaN(found.overflow) ? null : found;
  }
}

/** Returns a module's path up to its first index, `model.blocks.0`, or else its first two parts. */
export function blockOf(module) {
  const parts = module.split('.');
  const number = parts.findIndex((part) => /^\d+$/.test(part));
  return parts.slice(0, number < 0 ? 2 : number + 1).join('.');
}

const MINUS = '\u2212';

/** Formats a number with a typographic minus. */
export function signed(number, digits = 0) {
  return number.toFixed(digits).replace('-', MINUS);
}

/** Formats a power of two. */
export function power(exponent) {
  const digits = [...String(exponent)].map((one) => (one === '-' ? '⁻' : '⁰¹²³⁴⁵⁶⁷⁸⁹'[one]));
  return `2${digits.join('')}`;
}

/** Formats a log2 RMS. */
export function scaleText(value) {
  if (Number.isNaN(value)) return 'not measured';
  return Number.isFinite(value) ? `log₂ RMS ${signed(value, 1)}` : 'all zero';
}

/** Formats a fraction in percent, without rounding small ones to zero. */
export function percent(fraction) {
  if (!Number.isFinite(fraction)) return '–';
  if (fraction <= 0) return '0';
  if (fraction < 1e-4) return '<0.01 %';
  if (fraction >= 1) return '100 %';
  const value = 100 * fraction;
  return `${value < 10 ? value.toFixed(2) : Math.min(value, 99.9).toFixed(1)} %`;
}
