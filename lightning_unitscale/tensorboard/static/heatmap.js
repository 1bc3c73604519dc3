// The heat map: one row per tensor in graph order, one column per step, one panel per run.

import { cellPicture, hatching } from './cells.js';
import { element, oncePerFrame } from './dom.js';
import { FONT, RowLabels, SMALLEST_NAMED_ROW, shortened } from './labels.js';
import { columnAt } from './model.js';

const AXIS = 26;
const TITLE = 20;
const GAP = 18;
const FLAG = 9;
const SMALLEST_FLAG = 5;
const READABLE_ROW = 16;
// Show all rows in the view if they can be this high.
const SMALLEST_FITTING_ROW = 3;
const LARGEST_ROW = 26;

export class HeatMap {
  /** `onHover(cell or null, event)` and `onSelect(cell)`; a cell is {panel, row, column}. */
  constructor({ onHover, onSelect }) {
    this.base = element('canvas', { class: 'heat-cells' });
    this.overlay = element('canvas', { class: 'heat-marks' });
    this.view = element('div', { class: 'heat-view' }, this.base, this.overlay);
    this.spacer = element('div');
    this.node = element(
      'div',
      {
        class: 'heat',
        tabindex: '0',
        role: 'application',
        'aria-roledescription': 'heat map',
        'aria-describedby': 'scales-keys',
      },
      this.view,
      this.spacer,
    );
    this.model = null;
    this.hovered = null;
    this.draw = oncePerFrame(() => this.#draw());
    this.drawMarks = oncePerFrame(() => this.#drawMarks());
    new ResizeObserver(() => this.#resize()).observe(this.node);
    this.leave = () => {
      this.#hover(null);
      onHover(null, null);
    };
    this.node.addEventListener('scroll', () => {
      this.leave();
      this.draw();
    });
    this.node.addEventListener('focus', this.drawMarks);
    this.node.addEventListener('blur', this.drawMarks);
    this.overlay.addEventListener('pointermove', (event) => {
      this.#hover(this.cellAt(event.offsetX, event.offsetY));
      onHover(this.hovered, event);
    });
    this.overlay.addEventListener('pointerleave', this.leave);
    this.overlay.addEventListener('click', (event) => {
      const cell = this.cellAt(event.offsetX, event.offsetY);
      if (cell) onSelect(cell);
    });
  }

  /**
   * Shows `rows` ({name, module, isSource, isOperand}), `steps` from left to right, `panels` ({title,
   * data, places, columns}: the position of every row's tensor in the run and the run's column at
   * every step, -1 without), `stored`, `palette`, `rowMode` and `selected` ({row, step} or null).
   */
  set(model) {
    this.model = model;
    this.hovered = null;
    this.#resize();
  }

  /** Moves the selection without a new layout. */
  select(selected) {
    this.model.selected = selected;
    this.#reveal(selected.row);
    this.drawMarks();
  }

  /** Returns the cell under a point of the view, or null. */
  cellAt(x, y) {
    if (!this.model || y < this.header) return null;
    const row = Math.floor((y - this.header + this.node.scrollTop) / this.rowHeight);
    if (row < 0 || row >= this.model.rows.length) return null;
    for (let panel = 0; panel < this.model.panels.length; panel += 1) {
      const offset = x - this.#left(panel);
      if (offset < 0 || offset >= this.panelWidth) continue;
      const { columns } = this.model.panels[panel];
      const column = columns[Math.floor((offset / this.panelWidth) * columns.length)];
      if (column >= 0) return { panel, row, column };
    }
    return null;
  }

  /** Returns a cell's left, top, width and height in the view, in CSS pixels. */
  cellRect(panel, row, column) {
    const { steps, panels } = this.model;
    const own = panels[panel].data.steps;
    const width = this.panelWidth / steps.length;
    const first = columnAt(steps, own[column]);
    const stop = column + 1 < own.length ? columnAt(steps, own[column + 1]) : first + 1;
    return {
      left: this.#left(panel) + first * width,
      top: this.header + row * this.rowHeight - this.node.scrollTop,
      width: (stop - first) * width,
      height: this.rowHeight,
    };
  }

  /** Returns the value that a cell shows. */
  value({ panel, row, column }) {
    const { data, places } = this.model.panels[panel];
    return places[row] < 0 ? NaN : data.value(column, places[row], this.model.stored);
  }

  /** The number of rows in view. */
  get pageRows() {
    return Math.max(1, Math.floor((this.height - this.header) / this.rowHeight));
  }

  #left(panel) {
    return this.gutter + panel * (this.panelWidth + GAP);
  }

  #resize() {
    if (!this.model) return;
    const { rows, panels, rowMode } = this.model;
    this.header = AXIS + (panels.some(({ title }) => title) ? TITLE : 0);
    this.height = this.node.clientHeight;
    const area = this.height - this.header - 4;
    const fitting = Math.min(area / Math.max(rows.length, 1), LARGEST_ROW);
    const fits = rowMode === 'fit' || (rowMode === 'auto' && fitting >= SMALLEST_FITTING_ROW);
    this.rowHeight = fits ? fitting : Math.max(fitting, READABLE_ROW);
    this.isLabeled = this.rowHeight >= SMALLEST_NAMED_ROW;
    this.spacer.style.height = `${Math.max(0, rows.length * this.rowHeight - area - 1)}px`;
    // The width depends on the scroll bar, so read it after the height is set.
    this.width = this.node.clientWidth;
    this.labels = new RowLabels(rows);
    const share = panels.length > 1 ? 0.24 : 0.3;
    const most = Math.max(share * this.width, 110);
    this.gutter = this.labels.width(this.base.getContext('2d'), this.rowHeight, most);
    const gaps = GAP * (panels.length - 1);
    this.panelWidth = Math.max(40, (this.width - this.gutter - gaps - 12) / panels.length);
    for (const canvas of [this.base, this.overlay]) {
      const ratio = window.devicePixelRatio || 1;
      canvas.width = Math.round(this.width * ratio);
      canvas.height = Math.round(this.height * ratio);
      canvas.style.width = `${this.width}px`;
      canvas.style.height = `${this.height}px`;
      canvas.getContext('2d').setTransform(ratio, 0, 0, ratio, 0, 0);
    }
    // Draw the cleared canvases at once, or they would flicker.
    this.#draw();
  }

  #colors() {
    const style = getComputedStyle(this.node);
    const color = (name) => style.getPropertyValue(`--${name}`).trim();
    return {
      text: color('text'),
      muted: color('muted'),
      line: color('line'),
      hatch: color('hatch'),
      page: color('page'),
      accent: color('accent'),
      flag: color('flag'),
    };
  }

  #draw() {
    if (!this.model) return;
    const context = this.base.getContext('2d');
    const colors = this.#colors();
    context.clearRect(0, 0, this.width, this.height);
    const first = Math.floor(this.node.scrollTop / this.rowHeight);
    const inView = Math.ceil((this.height - this.header) / this.rowHeight) + 1;
    const stop = Math.min(this.model.rows.length, first + inView);
    context.save();
    context.beginPath();
    context.rect(0, this.header, this.width, this.height - this.header);
    context.clip();
    this.model.panels.forEach((_, panel) => this.#drawPanel(context, colors, panel, first, stop));
    const rowTop = (row) => this.header + row * this.rowHeight - this.node.scrollTop;
    const { gutter: right, header: top, height: bottom, rowHeight } = this;
    this.labels.draw(context, colors, { top, bottom, right, rowHeight, rowTop }, first, stop);
    context.restore();
    this.model.panels.forEach((_, panel) => this.#drawAxis(context, colors, panel));
    this.#drawMarks();
  }

  #drawPanel(context, colors, panel, first, stop) {
    if (stop <= first) return;
    const left = this.#left(panel);
    const top = this.header + first * this.rowHeight - this.node.scrollTop;
    const height = (stop - first) * this.rowHeight;
    context.fillStyle = hatching(context, colors.hatch);
    context.fillRect(left, top, this.panelWidth, height);
    const ratio = window.devicePixelRatio || 1;
    const picture = cellPicture(this.model, panel, {
      first,
      stop,
      width: Math.round(this.panelWidth * ratio),
      height: Math.ceil(height * ratio),
    });
    if (picture) {
      context.imageSmoothingEnabled = false;
      context.drawImage(picture, left, top, this.panelWidth, height);
    }
    if (this.rowHeight >= SMALLEST_NAMED_ROW) {
      context.fillStyle = colors.page;
      for (let row = first; row <= stop; row += 1) {
        context.fillRect(left, top + (row - first) * this.rowHeight - 0.5, this.panelWidth, 1);
      }
    }
  }

  #drawAxis(context, colors, panel) {
    const { steps } = this.model;
    const { title } = this.model.panels[panel];
    const left = this.#left(panel);
    context.textBaseline = 'alphabetic';
    context.textAlign = 'left';
    context.fillStyle = colors.text;
    context.font = `600 12px ${FONT}`;
    context.fillText(shortened(context, title, this.panelWidth), left, 15);
    context.font = `11px ${FONT}`;
    context.fillStyle = colors.muted;
    const numColumns = steps.length;
    const numTicks = Math.max(1, Math.min(numColumns, Math.floor(this.panelWidth / 80)));
    const stride = roundStride(numColumns / numTicks);
    for (let column = 0; column < numColumns; column += stride) {
      const x = left + ((column + 0.5) * this.panelWidth) / numColumns;
      const number = steps[column].toLocaleString('en');
      const text = column ? number : `step ${number}`;
      const { width } = context.measureText(text);
      const start = Math.max(x - width / 2, left);
      if (start + width < left + this.panelWidth) context.fillText(text, start, this.header - 9);
      context.fillRect(Math.round(x), this.header - 5, 1, 4);
    }
  }

  #hover(cell) {
    const before = this.hovered;
    const isSame =
      before && cell
        ? before.panel === cell.panel && before.row === cell.row && before.column === cell.column
        : before === cell;
    this.hovered = cell;
    if (!isSame) this.drawMarks();
  }

  #drawMarks() {
    if (!this.model) return;
    const context = this.overlay.getContext('2d');
    context.clearRect(0, 0, this.width, this.height);
    context.save();
    context.beginPath();
    context.rect(0, this.header - 2, this.width, this.height);
    context.clip();
    const colors = this.#colors();
    const { selected, panels } = this.model;
    panels.forEach((_, panel) => this.#drawAlerts(context, colors, panel));
    if (this.hovered) {
      const step = panels[this.hovered.panel].data.steps[this.hovered.column];
      this.#mark(context, this.hovered.row, step, [colors.text], false);
    }
    if (selected && selected.row >= 0) {
      this.#mark(context, selected.row, selected.step, [colors.page, colors.text], true);
    }
    context.restore();
  }

  /** Draws a flag at the upper left of every cell with an alert. */
  #drawAlerts(context, colors, panel) {
    const { rows, panels } = this.model;
    const { data, places } = panels[panel];
    if (!data.alertsOf.size) return;
    rows.forEach(({ name }, row) => {
      if (places[row] < 0) return;
      for (const { step } of data.alertsAt(name)) {
        const { left, top } = this.cellRect(panel, row, columnAt(data.steps, step));
        const height = Math.min(FLAG, Math.max(this.rowHeight, SMALLEST_FLAG));
        context.beginPath();
        context.moveTo(left, top);
        context.lineTo(left + FLAG, top);
        context.lineTo(left, top + height);
        context.closePath();
        // An outline in the color of the page makes flags visible on cells of every color.
        context.strokeStyle = colors.page;
        context.lineWidth = 3;
        context.lineJoin = 'round';
        context.stroke();
        context.fillStyle = colors.flag;
        context.fill();
      }
    });
  }

  #mark(context, row, step, strokes, isSelection) {
    this.model.panels.forEach(({ data }, panel) => {
      if (!data.steps.length) return;
      const cell = this.cellRect(panel, row, columnAt(data.steps, step));
      // The frame of a tiny cell must be large enough to see.
      const width = Math.max(cell.width, 5);
      const height = Math.max(cell.height, 5);
      const left = cell.left + (cell.width - width) / 2;
      const top = cell.top + (cell.height - height) / 2;
      if (isSelection) {
        context.fillStyle = strokes[1];
        context.globalAlpha = 0.6;
        context.fillRect(this.#left(panel), top - 1, this.panelWidth, 1);
        context.fillRect(this.#left(panel), top + height, this.panelWidth, 1);
        context.globalAlpha = 1;
        context.fillRect(this.gutter - 5, top, 4, height);
      }
      strokes.forEach((color, place) => {
        context.strokeStyle = color;
        context.lineWidth = strokes.length > 1 ? 4 - 2 * place : 1;
        context.strokeRect(left - 1, top - 1, width + 2, height + 2);
      });
    });
  }

  /** Scrolls a row into view, by as little as possible. */
  #reveal(row) {
    const top = row * this.rowHeight;
    const area = this.height - this.header - 6;
    if (top < this.node.scrollTop) this.node.scrollTop = top;
    else if (top + this.rowHeight > this.node.scrollTop + area) {
      this.node.scrollTop = top + this.rowHeight - area;
    }
  }
}

/** Returns the smallest of 1, 2, 5, 10, 20, 50, ... that is not below `least`. */
function roundStride(least) {
  const decade = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  return [1, 2, 5, 10].map((factor) => factor * decade).find((stride) => stride >= least);
}
