// The page: keeps its state and updates all parts when it changes.

import { readAddress, writeAddress } from './address.js';
import { AlertList, KINDS } from './alerts.js';
import { Controls, keysDescription, keysDialog } from './controls.js';
import { Detail } from './detail.js';
import { Divergence } from './divergence.js';
import { element } from './dom.js';
import { HeatMap } from './heatmap.js';
import { Ledger } from './ledger.js';
import { Legend } from './legend.js';
import {
  RunScales,
  alignedSteps,
  colorLimit,
  columnAt,
  headline,
  mergeOrders,
  nameFilter,
  newest,
  power,
  scaleText,
} from './model.js';
import { Palette } from './palette.js';

const REFRESH_MILLISECONDS = 20000;
const TURN = { forward: 'backward', backward: 'forward' };

export class App {
  constructor(source, theme) {
    this.source = source;
    this.theme = theme;
    this.state = {
      run: null,
      compared: null,
      direction: 'forward',
      stored: true,
      filter: '',
      operandsOnly: null,
      limit: 'auto',
      rowMode: 'auto',
      selected: null,
      ...readAddress(),
    };
    this.listing = { runs: [], formats: [] };
    this.loaded = new Map();
    this.rows = [];
    this.panels = [];
    // Counts the updates, for the browser tests.
    this.shown = 0;
    const change = (fields) => this.change(fields);
    this.controls = new Controls(this.state, {
      run: (run) => change({ run, compared: this.state.compared === run ? null : this.state.compared }),
      compared: (compared) => change({ compared }),
      direction: (direction) => change({ direction }),
      stored: (stored) => change({ stored }),
      rows: (rowMode) => change({ rowMode }),
      filter: (filter) => change({ filter }),
      operandsOnly: (operandsOnly) => change({ operandsOnly }),
      help: () => this.keys.showModal(),
    });
    this.legend = new Legend({ onLimit: (limit) => change({ limit }) });
    const onSelect = async ({ tensor, step, direction }) => {
      const isHidden = !this.rows.some(({ name }) => name === tensor);
      if (isHidden) this.controls.filter.value = '';
      if (isHidden || direction !== this.state.direction) {
        await this.change({ direction, filter: this.controls.filter.value, operandsOnly: false });
      }
      this.select(tensor, step);
    };
    this.alerts = new AlertList({ onSelect });
    this.divergence = new Divergence({ load: (query) => this.source.json('divergence', query), onSelect });
    this.ledger = new Ledger({ load: (query) => this.source.json('precision', query), onSelect });
    this.heatMap = new HeatMap({
      onHover: (cell, event) => this.#showTip(cell, event),
      onSelect: ({ panel, row, column }) =>
        this.select(this.rows[row].name, this.panels[panel].data.steps[column]),
    });
    this.detail = new Detail({
      load: (route, query) => this.source.frame(route, query),
      onStep: (step) => this.select(this.state.selected.name, Math.round(step)),
      onClose: () => this.close(),
    });
    this.tip = element('div', { class: 'tip', hidden: true });
    this.spoken = element('p', { class: 'unseen', role: 'status' });
    this.message = element('div', { class: 'message', hidden: true });
    this.keys = keysDialog();
    this.main = element('main', {}, this.message, this.heatMap.node, this.detail.node);
    this.node = element(
      'div',
      { class: 'scales' },
      this.controls.node,
      this.legend.node,
      this.divergence.node,
      this.alerts.node,
      this.ledger.node,
      this.main,
      this.tip,
      this.spoken,
      keysDescription(),
      this.keys,
    );
    document.addEventListener('keydown', (event) => this.#onKey(event));
    theme.onChange(() => this.update());
  }

  /** Reads the runs and shows the newest, then refreshes regularly. */
  async start() {
    await this.refresh();
    if (!this.source.isLive) return;
    setInterval(() => {
      if (!document.hidden) this.refresh();
    }, REFRESH_MILLISECONDS);
  }

  /** Reads the list of runs, and reloads those that have grown. */
  async refresh() {
    try {
      this.listing = await this.source.runs();
    } catch (error) {
      if (!this.panels.length) this.#say('The scales cannot be read.', error.message);
      return;
    }
    const { runs, formats } = this.listing;
    this.detail.formats = formats;
    const names = runs.map((one) => one.name);
    if (!names.includes(this.state.run)) this.state.run = newest(runs);
    if (!names.includes(this.state.compared)) this.state.compared = null;
    await this.update();
  }

  /** Sets a part of the state and shows it. */
  change(fields) {
    Object.assign(this.state, fields);
    return this.update();
  }

  /** Shows the state, after loading what it needs. */
  async update() {
    const { run, compared, direction, stored } = this.state;
    const names = this.listing.runs.map((one) => one.name);
    this.controls.setRuns(names, run, compared);
    this.controls.direction.set(direction);
    this.controls.view.set(stored ? 'stored' : 'true');
    // Without a run the page shows only a message.
    this.node.classList.toggle('empty', run === null);
    if (run === null) {
      this.#say('No scales yet.', 'empty');
      this.shown += 1;
      return;
    }
    const runs = compared === null ? [run] : [run, compared];
    const asked = (this.asked = {});
    let found;
    try {
      found = await Promise.all(runs.map((name) => this.#load(name, direction)));
    } catch (error) {
      if (this.asked === asked) this.#say('The scales cannot be read.', error.message);
      return;
    }
    if (this.asked === asked) this.#show(found);
  }

  /** Selects a cell, which opens the panel about its tensor. */
  select(name, step) {
    const isNew = this.state.selected?.name !== name || this.detail.node.hidden;
    this.state.selected = { name, step };
    const wasHidden = this.detail.node.hidden;
    if (isNew) this.#showDetail();
    else this.detail.setStep(step);
    // The panel takes space from the heat map, which then lays itself out again.
    if (wasHidden) this.heatMap.set({ ...this.heatMap.model, selected: this.#selectedCell() });
    else this.heatMap.select(this.#selectedCell());
    this.#speak();
    this.#remember();
  }

  /** Closes the panel and clears the selection. */
  close() {
    this.state.selected = null;
    this.detail.hide();
    this.heatMap.set({ ...this.heatMap.model, selected: null });
    this.heatMap.node.focus();
    this.#remember();
  }

  async #load(run, direction) {
    const listed = this.listing.runs.find((one) => one.name === run);
    const isMeasured = listed.last_steps[direction] !== undefined;
    const key = `${direction} ${run}`;
    const { version } = listed;
    const known = this.loaded.get(key);
    if (known?.version === version) return known.data;
    const [{ header, arrays }, alerts] = await Promise.all([
      isMeasured ? this.source.frame('scales', { run, direction }) : EMPTY,
      this.source.json('alerts', { run }),
    ]);
    const data = new RunScales(run, direction, header, arrays, alerts);
    this.loaded.set(key, { version, data });
    if (known) this.detail.forget();
    return data;
  }

  #show(found) {
    const { stored, filter, limit, rowMode, direction, run } = this.state;
    const names = mergeOrders(found.map((data) => data.names));
    const operands = new Set(found.flatMap((data) => data.names.filter((_, k) => data.operands[k])));
    const known = new Map(
      found.flatMap(({ names: own, modules, sources }) =>
        own.map((name, k) => [
          name,
          { name, module: modules[k], isSource: sources[k], isOperand: operands.has(name) },
        ]),
      ),
    );
    // Only gradients of matmul outputs have units, and the others would hide them.
    const only = operands.size ? this.state.operandsOnly ?? direction === 'backward' : null;
    const matches = nameFilter(filter);
    this.rows = names.filter((name) => matches(name) && (!only || operands.has(name))).map((name) => known.get(name));
    const { steps, columns } = alignedSteps(found);
    this.panels = found.map((data, k) => ({
      title: found.length > 1 ? data.run : '',
      data,
      places: this.rows.map(({ name }) => data.position.get(name) ?? -1),
      columns: columns[k],
    }));
    this.controls.setOperandsOnly(only);
    this.controls.setCount(this.rows.length, names.length);
    const range = limit === 'auto' ? colorLimit(found, stored) : limit;
    this.palette = new Palette(this.theme.name, range);
    const hasFlags = found.some((data) => data.alertsOf.size > 0);
    // An alert about a NaN has more detail than the notice.
    const silent = found.filter(({ alerts }) => !alerts.some(({ kind }) => kind === 'nonfinite'));
    const bad = silent.map((data) => data.firstBad()).find((one) => one !== null) ?? null;
    this.legend.set(this.palette, {
      hasFlags,
      hasMarks: operands.size > 0 && !only,
      headline: headline(found),
      bad,
      onBad: () => this.select(bad.name, bad.step),
    });
    this.alerts.set(found);
    this.divergence.set(found.map((data) => this.listing.runs.find(({ name }) => name === data.run)));
    this.ledger.set(this.listing.runs.find(({ name }) => name === run), names);
    const turn = TURN[direction];
    if (!names.length) this.#say(`Nothing was measured ${direction}.`, `Try ${turn} (key ${turn[0]}).`);
    else if (!this.rows.length) this.#say(`No tensor matches “${filter}”.`, 'Escape clears the filter.');
    else this.#say(null);
    const label = `log2 RMS of ${this.rows.length} tensors by step, ${direction}, run ${run}`;
    this.heatMap.node.setAttribute('aria-label', label);
    const selected = this.#selectedCell();
    this.tip.hidden = true;
    this.heatMap.set({ rows: this.rows, steps, panels: this.panels, stored, palette: this.palette, rowMode, selected });
    if (this.rows.length) this.controls.rows.set(this.heatMap.isLabeled ? 'named' : 'fit');
    if (this.state.selected) this.#showDetail();
    this.#remember();
    this.shown += 1;
  }

  /** Writes the state into the address, which leaves out the newest run's name. */
  #remember() {
    const { run } = this.state;
    writeAddress({ ...this.state, run: run === newest(this.listing.runs) ? null : run });
  }

  #selectedCell() {
    const { selected } = this.state;
    if (!selected) return null;
    return { row: this.rows.findIndex(({ name }) => name === selected.name), step: selected.step };
  }

  #showDetail() {
    const { selected, stored, direction } = this.state;
    const runs = this.panels.map(({ data }) => data).filter((data) => data.position.has(selected.name));
    const module = runs.length ? runs[0].modules[runs[0].position.get(selected.name)] : '';
    this.detail.show({ ...selected, module, stored, direction, runs });
  }

  #cellText({ panel, row, column }) {
    const { data, places } = this.panels[panel];
    const tensor = places[row];
    if (tensor < 0) return ['not in this run'];
    const step = data.steps[column].toLocaleString('en');
    const unit = data.unit(column, tensor);
    const texts = [`step ${step}`, scaleText(data.value(column, tensor, this.state.stored))];
    if (unit) texts.push(`unit ${power(unit)}`);
    if (data.operands[tensor]) {
      texts.push(data.direction === 'forward' ? 'read by a matmul' : 'gradient of a matmul output');
    }
    const bad = data.bad(column, tensor);
    if (bad) texts.push(`${bad.toLocaleString('en')} NaN or infinite`);
    const alerts = data.alertsAt(this.rows[row].name).filter((one) => one.step === data.steps[column]);
    if (alerts.length) texts.push(`alert: ${alerts.map(({ kind }) => KINDS[kind] ?? kind).join(', ')}`);
    return texts;
  }

  #showTip(cell, event) {
    this.tip.hidden = !cell;
    if (!cell) return;
    const lines = this.#cellText(cell).map((text) => element('span', {}, text));
    this.tip.replaceChildren(element('b', {}, this.rows[cell.row].name), ...lines);
    const box = this.tip.getBoundingClientRect();
    const left = event.clientX + 14 + box.width > innerWidth ? event.clientX - 10 - box.width : event.clientX + 14;
    const top = Math.min(event.clientY + 14, innerHeight - box.height - 6);
    this.tip.style.transform = `translate(${Math.max(4, left)}px, ${top}px)`;
  }

  #speak() {
    const { row, step } = this.#selectedCell();
    if (row < 0) return;
    const panel = this.panels.findIndex(({ places }) => places[row] >= 0);
    const column = columnAt(this.panels[Math.max(panel, 0)].data.steps, step);
    const texts = this.#cellText({ panel: Math.max(panel, 0), row, column });
    this.spoken.textContent = [this.rows[row].name, ...texts].join(', ');
  }

  #say(title, text) {
    this.message.hidden = title === null;
    this.main.classList.toggle('covered', title !== null);
    if (title === null) return;
    const parts = text === 'empty' ? firstSteps() : [element('p', {}, text)];
    this.message.replaceChildren(element('h2', {}, title), ...parts);
  }

  #onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || this.keys.open) return;
    // Another cell may be under the pointer now.
    this.heatMap.leave();
    const { target } = event;
    const isText = target === this.controls.filter || target.tagName === 'SELECT';
    if (event.key === 'Escape') {
      if (target === this.controls.filter && this.state.filter) this.#clearFilter();
      else if (this.state.selected && !isText) this.close();
      this.heatMap.node.focus();
      return;
    }
    const isButton = target.tagName === 'BUTTON';
    if (isText || (isButton && event.key === 'Enter')) return;
    const { direction, stored, rowMode } = this.state;
    const actions = {
      '/': () => this.controls.filter.focus(),
      f: () => direction === 'forward' || this.change({ direction: 'forward' }),
      b: () => direction === 'backward' || this.change({ direction: 'backward' }),
      s: () => this.change({ stored: !stored }),
      o: () => this.controls.operands.click(),
      z: () => this.change({ rowMode: this.heatMap.isLabeled && rowMode !== 'fit' ? 'fit' : 'named' }),
      l: () => this.detail.toggleLog(),
      '[': () => this.detail.setShift(this.detail.shift - 1),
      ']': () => this.detail.setShift(this.detail.shift + 1),
      '?': () => this.keys.showModal(),
      ...(target === this.heatMap.node || target === document.body || isButton ? this.#moves() : {}),
    };
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }

  #moves() {
    const page = this.heatMap.pageRows;
    const far = Infinity;
    return {
      ArrowUp: () => this.#move(-1, 0),
      ArrowDown: () => this.#move(1, 0),
      ArrowLeft: () => this.#move(0, -1),
      ArrowRight: () => this.#move(0, 1),
      PageUp: () => this.#move(-page, 0),
      PageDown: () => this.#move(page, 0),
      Home: () => this.#move(0, -far),
      End: () => this.#move(0, far),
      Enter: () => this.#move(0, 0),
    };
  }

  /** Moves the selection, or selects the last step of the first row. */
  #move(rows, columns) {
    const { steps } = this.panels[0]?.data ?? { steps: [] };
    if (!this.rows.length || !steps.length) return;
    const cell = this.#selectedCell();
    if (!cell || cell.row < 0) {
      this.select(this.rows[0].name, steps.at(-1));
      return;
    }
    const clamp = (value, length) => Math.min(Math.max(value, 0), length - 1);
    const column = clamp(columnAt(steps, cell.step) + columns, steps.length);
    this.select(this.rows[clamp(cell.row + rows, this.rows.length)].name, steps[column]);
  }

  #clearFilter() {
    this.controls.filter.value = '';
    this.change({ filter: '' });
  }
}

const EMPTY = {
  header: { names: [], modules: [], sources: [], operands: [], steps: [], unit_rows: [], nonfinite_rows: [] },
  arrays: { log2_rms: new Float32Array(), log2_unit: new Float32Array(), nonfinite: new Float32Array() },
};

/** Returns instructions for a log folder without scales. */
function firstSteps() {
  const code = [
    'from lightning.pytorch import Trainer',
    'from lightning_unitscale import ScaleMonitor, UnitScaleCallback',
    '',
    'monitor = ScaleMonitor(every_n_steps=50)',
    'trainer = Trainer(callbacks=[UnitScaleCallback(), monitor])',
    'trainer.fit(model)',
  ].join('\n');
  return [
    element('p', {}, 'No run in this log folder has scales. Add the monitor to a Trainer that logs to TensorBoard:'),
    element('pre', {}, element('code', {}, code)),
    element('p', {}, 'The page updates after the first sampled step.'),
  ];
}
