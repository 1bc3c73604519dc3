// The labels at the left of the heat map: the rows' names, or their blocks if rows are too low.

import { blockOf } from './model.js';

export const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
/** The smallest height of a row with a name. */
export const SMALLEST_NAMED_ROW = 10;
const NAME_SIZES = [9, 12];
const BLOCK_SIZE = 11;
const BLOCK_DISTANCE = 12;
const BRACKET = 20;

/** The labels of `rows`, {name, module, isSource, isOperand}; a source has no inputs. */
export class RowLabels {
  constructor(rows) {
    // If all are operands, marks would not distinguish any.
    const isMixed = rows.some(({ isOperand }) => !isOperand);
    this.marks = isMixed ? stretches(rows, ({ isOperand }) => isOperand).filter(({ start }) => rows[start].isOperand) : [];
    this.names = rows.map(({ name, module }) => {
      const rest = module && name.startsWith(`${module}.`) ? name.slice(module.length + 1) : name;
      return { path: name.slice(0, name.length - rest.length), rest, block: blockOf(module) };
    });
    this.blocks = stretches(this.names, ({ block }) => block);
    const parts = stretches(rows, ({ isSource }) => isSource);
    // If all are of one kind, they need no headings.
    this.parts = parts.length > 1 ? parts.map((part) => ({ ...part, text: partName(rows, part) })) : [];
  }

  /** Returns the width that the labels need at a height of the rows, at most `most`. */
  width(context, rowHeight, most) {
    const isNamed = rowHeight >= SMALLEST_NAMED_ROW;
    context.font = `${isNamed ? nameSize(rowHeight) : BLOCK_SIZE}px ${FONT}`;
    const texts = this.names.map(({ path, rest, block }) => (isNamed ? path + rest : block || rest));
    const widest = texts.reduce((one, other) => (other.length > one.length ? other : one), '');
    // The longest text is usually the widest one, or close to it.
    const wanted = context.measureText(widest).width * 1.08 + 22 + this.#bracket;
    return Math.round(Math.min(Math.max(wanted, 70), most));
  }

  /** Draws the labels in view: `place` has top, bottom, right, rowHeight, and rowTop(row). */
  draw(context, colors, place, first, stop) {
    context.textBaseline = 'middle';
    this.#drawParts(context, colors, place);
    context.fillStyle = colors.accent;
    for (const { start, end } of this.marks) {
      const top = place.rowTop(start);
      context.fillRect(place.right - 4, top, 3, place.rowTop(end) - top);
    }
    context.textAlign = 'right';
    if (place.rowHeight < SMALLEST_NAMED_ROW) {
      this.#drawBlocks(context, colors, place);
      return;
    }
    context.font = `${nameSize(place.rowHeight)}px ${FONT}`;
    for (let row = first; row < stop; row += 1) this.#drawName(context, colors, place, row);
  }

  get #bracket() {
    return this.parts.length ? BRACKET : 0;
  }

  /** Draws headings at the far left, since blocks of parameters and of results have equal names. */
  #drawParts(context, colors, { top, bottom, rowTop }) {
    context.textAlign = 'center';
    context.font = `${BLOCK_SIZE}px ${FONT}`;
    for (const { start, end, text } of this.parts) {
      const from = Math.max(rowTop(start) + 1, top);
      const to = Math.min(rowTop(end) - 1, bottom);
      if (to <= from) continue;
      context.fillStyle = colors.line;
      context.fillRect(BRACKET - 3, from, 2, to - from);
      if (context.measureText(text).width + 6 > to - from) continue;
      context.fillStyle = colors.muted;
      context.save();
      context.translate(BRACKET / 2, (from + to) / 2);
      context.rotate(-Math.PI / 2);
      context.fillText(text, 0, 0);
      context.restore();
    }
  }

  #drawBlocks(context, colors, { top, bottom, right, rowTop }) {
    context.font = `${BLOCK_SIZE}px ${FONT}`;
    let lowest = -Infinity;
    for (const { start, end } of this.blocks) {
      const middle = (rowTop(start) + rowTop(end)) / 2;
      context.fillStyle = colors.line;
      context.fillRect(right - 6, rowTop(start), 6, 1);
      if (middle - lowest < BLOCK_DISTANCE) continue;
      context.fillStyle = colors.muted;
      const { block, rest } = this.names[start];
      const text = shortened(context, block || rest, right - 14 - this.#bracket);
      const isInView = middle > top - 8 && middle < bottom + 8;
      const inView = Math.min(Math.max(middle, top + 6), bottom - 7);
      context.fillText(text, right - 10, isInView ? inView : middle);
      lowest = middle;
    }
  }

  #drawName(context, colors, { right, rowHeight, rowTop }, row) {
    const { path, rest, block } = this.names[row];
    const y = rowTop(row) + rowHeight / 2;
    const room = right - 16 - this.#bracket;
    const widthOf = (text) => context.measureText(text).width;
    let [head, tail] = [path, rest];
    if (widthOf(head + tail) > room && block) {
      // The block and the end of the name identify a tensor.
      head = `${block}.`;
      tail = shortened(context, (path + rest).slice(head.length), room - widthOf(head), 0);
    }
    context.fillStyle = colors.text;
    context.fillText(tail, right - 8, y);
    context.fillStyle = colors.muted;
    context.fillText(head, right - 8 - widthOf(tail), y);
  }
}

/** Shortens a text to `room`: removes its middle, or its beginning if `head` is 0. */
export function shortened(context, text, room, head = 0.5) {
  let shown = text;
  for (let kept = text.length - 1; kept > 0 && context.measureText(shown).width > room; kept -= 1) {
    const first = Math.round(head * kept);
    shown = `${text.slice(0, first)}…${text.slice(text.length - kept + first)}`;
  }
  return shown;
}

function nameSize(rowHeight) {
  return Math.min(NAME_SIZES[1], Math.max(NAME_SIZES[0], rowHeight - 3));
}

/** Returns the runs of neighbors with the same key, as {start, end}. */
function stretches(items, keyOf) {
  const found = [];
  items.forEach((item, place) => {
    if (place && keyOf(item) === keyOf(items[place - 1])) found.at(-1).end = place + 1;
    else found.push({ start: place, end: place + 1 });
  });
  return found;
}

function partName(rows, { start, end }) {
  if (!rows[start].isSource) return 'results';
  // Parameters have a module, and inputs of the step have none.
  const kinds = new Set(rows.slice(start, end).map(({ module }) => (module ? 'parameters' : 'inputs')));
  return [...kinds].sort().reverse().join(', ');
}
