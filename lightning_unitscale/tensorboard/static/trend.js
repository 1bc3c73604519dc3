// Draws log2 RMS of one tensor over the steps, one line per run.

import { svg } from './dom.js';
import { columnAt, signed } from './model.js';

const WIDTH = 420;
const HEIGHT = 92;
const LEFT = 58;
const RIGHT = 8;
const TOP = 6;
const BOTTOM = 74;

/** Draws `lines` of {steps, values} and a marker at `step`; a click calls `onStep`. */
export function trend({ lines, step, label, onStep }) {
  const finite = lines.flatMap(({ values }) => values.filter(Number.isFinite));
  const steps = lines.flatMap((line) => [line.steps[0], line.steps.at(-1)]);
  const [first, last] = [Math.min(...steps), Math.max(...steps)];
  let [low, high] = [-1, 1];
  if (finite.length) {
    low = finite.reduce((one, other) => Math.min(one, other)) - 0.5;
    high = finite.reduce((one, other) => Math.max(one, other)) + 0.5;
  }
  // A single step is in the middle.
  const shareOf = (at) => (last > first ? (at - first) / (last - first) : 0.5);
  const x = (at) => LEFT + shareOf(at) * (WIDTH - LEFT - RIGHT);
  const y = (value) => BOTTOM - ((value - low) / (high - low)) * (BOTTOM - TOP);
  const drawing = svg('svg', {
    class: 'trend',
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
    role: 'img',
    'aria-label': label,
    onclick: (event) => {
      const box = drawing.getBoundingClientRect();
      const share = ((event.clientX - box.left) / box.width) * WIDTH - LEFT;
      onStep(first + (share / (WIDTH - LEFT - RIGHT)) * (last - first));
    },
  });
  const stride = [0.25, 0.5, 1, 2, 4, 8, 16, 32, 64].find((one) => (high - low) / one <= 4) ?? 128;
  const digits = Math.max(0, -Math.log2(stride));
  for (const value of ticks(low, high, stride)) {
    drawing.append(
      svg('line', { class: 'grid', x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }),
      svg('text', { class: 'caption', x: LEFT - 6, y: y(value) + 4 }, signed(value, digits)),
    );
  }
  drawing.append(
    ...stepTicks(first, last),
    svg('line', { class: 'now', x1: x(step), x2: x(step), y1: TOP, y2: BOTTOM }),
  );
  lines.forEach((line, place) => {
    drawing.append(svg('path', { class: `line run-${place}`, d: path(line, x, y) }));
    const column = columnAt(line.steps, step);
    const value = line.values[column];
    if (Number.isFinite(value)) {
      const at = { cx: x(line.steps[column]), cy: y(value), r: 3 };
      drawing.append(svg('circle', { class: `dot run-${place}`, ...at }));
    }
  });
  return drawing;
}

function stepTicks(first, last) {
  const text = `step ${first.toLocaleString('en')}`;
  const y = HEIGHT - 4;
  if (first === last) return [svg('text', { class: 'tick', x: (LEFT + WIDTH - RIGHT) / 2, y }, text)];
  return [
    svg('text', { class: 'tick start', x: LEFT, y }, text),
    svg('text', { class: 'tick end', x: WIDTH - RIGHT, y }, last.toLocaleString('en')),
  ];
}

/** Returns a line with gaps at missing values. */
function path({ steps, values }, x, y) {
  let isDown = false;
  const parts = [];
  values.forEach((value, place) => {
    if (Number.isFinite(value)) {
      const command = isDown ? 'L' : 'M';
      parts.push(`${command}${x(steps[place]).toFixed(1)},${y(value).toFixed(1)}`);
    }
    isDown = Number.isFinite(value);
  });
  return parts.join('');
}

function ticks(low, high, stride) {
  const found = [];
  for (let value = Math.ceil(low / stride) * stride; value <= high; value += stride) found.push(value);
  return found;
}
