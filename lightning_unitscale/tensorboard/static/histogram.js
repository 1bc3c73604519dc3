// Draws the exponent histogram of a tensor at one step, over the ranges of the number formats.

import { element, svg } from './dom.js';
import { percent, power, scaleText, shares, signed } from './model.js';

const WIDTH = 420;
const LEFT = 58;
const RIGHT = 8;
const BARS_TOP = 8;
const AXIS = 18;
const LANE = 17;
const LOG_FLOOR = 1e-5;

/** Returns the first and last exponent of the axis, which includes the data of all steps. */
export function exponentDomain(series, stored) {
  let [low, high] = [-20, 10];
  for (const one of series.filter((each) => each && each.steps.length)) {
    const units = stored ? one.units : [0];
    low = Math.min(low, one.firstExponent - Math.max(...units));
    high = Math.max(high, one.firstExponent + one.numExponents - Math.min(...units));
  }
  return [low - 3, high + 3];
}

/**
 * Draws a histogram.
 *
 * `counts` come from `ExponentSeries.at` and `domain` from `exponentDomain`. `shift`, the power of
 * two before the cast, moves the ranges of the formats instead of the tensor. `lanes` are the
 * formats whose ranges are drawn below.
 */
export function histogram({ counts, domain, shift, format, lanes, bars, isLog, label, onChoose }) {
  const bottom = BARS_TOP + bars;
  const height = bottom + AXIS + LANE * lanes.length + 2;
  const [low, high] = domain;
  const x = (exponent) => {
    const inside = Math.min(Math.max(exponent, low), high);
    return LEFT + ((inside - low) / (high - low)) * (WIDTH - LEFT - RIGHT);
  };
  const drawing = svg('svg', {
    class: 'histogram',
    viewBox: `0 0 ${WIDTH} ${height}`,
    role: 'img',
    'aria-label': label,
  });
  drawing.append(background(x, bottom, format, shift), ...axis(x, bottom, domain));
  drawing.append(barsOf(x, bottom, counts, format, shift, isLog));
  lanes.forEach((one, place) => {
    drawing.append(lane(x, one, shift, bottom + AXIS + place * LANE, one === format, onChoose));
  });
  return drawing;
}

/** Returns the exponents where a format's nonzero and normal ranges begin, and where it ends. */
function edges(format, shift) {
  return {
    zero: Math.log2(format.flush_threshold) - shift,
    normal: Math.log2(format.smallest_normal) - shift,
    end: Math.log2(format.overflow_threshold) - shift,
  };
}

function span(x, from, to, attributes) {
  return svg('rect', { x: x(from), width: Math.max(0, x(to) - x(from)), ...attributes });
}

function background(x, bottom, format, shift) {
  const { zero, normal, end } = edges(format, shift);
  const size = { y: BARS_TOP, height: bottom - BARS_TOP };
  return svg(
    'g',
    { 'aria-hidden': 'true' },
    span(x, -Infinity, zero, { ...size, class: 'band lost' }),
    span(x, zero, normal, { ...size, class: 'band subnormal' }),
    span(x, normal, end, { ...size, class: 'band normal' }),
    span(x, end, Infinity, { ...size, class: 'band lost' }),
  );
}

/** Returns a line that explains the bands behind the bars. */
export function bandKey(format) {
  const entry = (band, text, title) =>
    element('span', { title }, element('i', { class: `swatch ${band}` }), text);
  return element(
    'p',
    { class: 'note band-key' },
    entry('normal', `normal in ${shortName(format)}`),
    entry('subnormal', 'subnormal: fewer bits'),
    entry('lost', 'lost', 'Rounded to zero on the left, overflow on the right'),
  );
}

function axis(x, bottom, [low, high]) {
  const parts = [svg('line', { class: 'axis', x1: LEFT, x2: WIDTH - RIGHT, y1: bottom, y2: bottom })];
  const stride = [4, 8, 16, 32].find((one) => (high - low) / one <= 11) ?? 64;
  for (let exponent = Math.ceil(low / stride) * stride; exponent <= high; exponent += stride) {
    const at = x(exponent);
    parts.push(svg('line', { class: 'axis', x1: at, x2: at, y1: bottom, y2: bottom + 3 }));
    // The first one would overlap the caption.
    if (at - LEFT < 12) continue;
    parts.push(svg('text', { x: at, y: bottom + 14, class: 'tick' }, signed(exponent)));
  }
  parts.push(svg('text', { x: LEFT - 6, y: bottom + 14, class: 'caption' }, 'log₂|x|'));
  return parts;
}

function barsOf(x, bottom, { first, counts, numSampled }, format, shift, isLog) {
  const largest = Math.max(...counts, 1);
  const heightOf = (count) => {
    if (!isLog) return count / largest;
    return Math.max(0, 1 - Math.log(count / largest) / Math.log(LOG_FLOOR));
  };
  const group = svg('g', { class: 'bars' });
  counts.forEach((count, place) => {
    if (!count) return;
    const exponent = first + place;
    const height = Math.max(1, heightOf(count) * (bottom - BARS_TOP - 6));
    const kind = fate(format, exponent + shift);
    const share = numSampled ? count / numSampled : NaN;
    const title = `${power(exponent)} to ${power(exponent + 1)}: ${percent(share)}, ${kind}`;
    group.append(
      span(x, exponent + 0.06, exponent + 0.94, {
        y: bottom - height,
        height,
        class: `bar ${kind}`,
        'data-exponent': exponent,
        'data-count': count,
      }),
    );
    group.lastChild.append(svg('title', {}, title));
  });
  return group;
}

/** Returns the kind that most of a binade becomes. */
function fate(format, exponent) {
  const binade = { first: exponent, counts: [1], numSampled: 1 };
  const parts = shares(format, binade, 0);
  return Object.keys(parts).reduce((one, other) => (parts[other] > parts[one] ? other : one));
}

function lane(x, format, shift, top, isChosen, onChoose) {
  const { zero, normal, end } = edges(format, shift);
  const size = { y: top + 4, height: LANE - 8 };
  const choose = () => onChoose(format.name);
  return svg(
    'g',
    { class: isChosen ? 'lane chosen' : 'lane', 'data-format': format.name, onclick: choose },
    svg('rect', { x: 0, y: top, width: WIDTH, height: LANE, class: 'hit' }),
    svg('text', { x: LEFT - 6, y: top + 12.5, class: 'caption' }, shortName(format)),
    span(x, zero, normal, { ...size, class: 'range subnormal' }),
    span(x, normal, end, { ...size, class: 'range normal' }),
    svg('title', {}, `${format.name}: subnormal from ${power(zero + 1)}, normal from ${power(normal)}`),
  );
}

/**
 * Returns the fractions of one tensor for all formats as a table, whose rows select a format.
 *
 * `runs` are {counts, monitored}: counts from `ExponentSeries.at` or null, and a function that returns
 * a format's fractions from the device, or null.
 */
export function fractionTable({ runs, shift, formats, chosen, onChoose }) {
  const kinds = [
    ['overflow', 'overflows'],
    ['subnormal', 'subnormal'],
    ['flushed', 'to zero'],
  ];
  const several = runs.length > 1;
  const dot = (place) => (several ? element('i', { class: `key run-${place}` }) : null);
  const rows = formats.map((format) => {
    const found = runs.map(({ counts, monitored }) => ({
      ...(counts ? shares(format, counts, shift) : {}),
      ...monitored(format.name),
    }));
    const cells = kinds.flatMap(([kind]) =>
      found.map((one, place) => {
        const value = one[kind] ?? NaN;
        const lost = kind === 'subnormal' ? 0 : value;
        const grade = lost >= 0.01 ? 'bad' : lost >= 1e-4 ? 'some' : '';
        const data = { 'data-kind': kind, 'data-run': place, 'data-value': value };
        return element('td', { class: grade, ...data }, percent(value));
      }),
    );
    const radio = element('input', {
      type: 'radio',
      name: 'format',
      checked: format === chosen,
      onchange: () => onChoose(format.name),
    });
    const label = element('label', {}, radio, shortName(format));
    const row = { 'data-format': format.name, class: format === chosen ? 'chosen' : '' };
    return element('tr', row, element('th', { scope: 'row' }, label), ...cells);
  });
  const titles = kinds.map(([, title]) =>
    element('th', { scope: 'colgroup', colspan: runs.length }, ...runs.map((_, k) => dot(k)), title),
  );
  const head = element('tr', {}, element('th', { scope: 'col' }, 'format'), ...titles);
  const body = element('tbody', {}, ...rows);
  return element('table', { class: 'fractions' }, element('thead', {}, head), body);
}

/** Returns what block formats lose of one tensor as a table; null if no run has counted blocks. */
export function blockTable(runs) {
  const several = runs.length > 1;
  const rows = runs.flatMap(({ blocks, run }, place) =>
    blocks().map(({ name, flushed, saturated, underflow, spread }) => {
      const key = several ? element('i', { class: `key run-${place}`, title: run.run }) : null;
      const cells = Object.entries({ flushed, saturated, underflow }).map(([kind, value]) =>
        element('td', { 'data-kind': kind, 'data-run': place, 'data-value': value }, percent(value)),
      );
      const factor = Number.isNaN(spread) ? '-' : `2^${spread.toFixed(1)}`;
      cells.push(element('td', { 'data-kind': 'spread', 'data-run': place, 'data-value': spread }, factor));
      return element('tr', { 'data-format': name }, element('th', { scope: 'row' }, key, name), ...cells);
    }),
  );
  if (!rows.length) return null;
  const titles = ['blocks', 'to zero', 'scale saturates', 'scale underflows', 'spread'];
  const head = element('tr', {}, ...titles.map((title) => element('th', { scope: 'col' }, title)));
  return element(
    'table',
    { class: 'fractions blocks', title: 'Blocks lie along the dimension that the matmul sums over. Spread: standard deviation of log2 of the blocks\u2019 largest magnitudes.' },
    element('thead', {}, head),
    element('tbody', {}, ...rows),
  );
}

function shortName(format) {
  return format.name.replace('FN', '');
}

/** Returns a line about a tensor: its step if it differs, its scale, its unit, its zeros. */
export function summaryLine({ step, value, unit, bad, counts }) {
  const parts = [scaleText(value)];
  if (step !== null) parts.unshift(`step ${step.toLocaleString('en')}`);
  if (bad) parts.push(`${bad.toLocaleString('en')} NaN or infinite`);
  if (unit) parts.push(`unit ${power(unit)}`);
  if (counts && counts.numSampled) {
    const present = counts.counts.reduce((sum, one) => sum + one, 0);
    const rest = 1 - present / counts.numSampled;
    if (rest > 1e-6) parts.push(`${percent(rest)} zero or not finite`);
  }
  return parts.join(' · ');
}
