// The panel for one tensor: its scale over the steps, its exponents, and its losses in formats.

import { element } from './dom.js';
import { bandKey, blockTable, exponentDomain, fractionTable, histogram, summaryLine } from './histogram.js';
import { MonitoredFractions, ExponentSeries, columnAt, power } from './model.js';
import { trend } from './trend.js';

const LARGEST_SHIFT = 40;

export class Detail {
  /** `load(route, query)` resolves to a frame; `onStep(step)` and `onClose()` notify the page. */
  constructor({ load, onStep, onClose }) {
    this.load = load;
    this.onStep = onStep;
    this.shift = 0;
    this.chosen = 'E4M3FN';
    this.isLog = false;
    this.formats = [];
    this.series = new Map();
    this.subject = null;
    this.title = element('h2', {});
    this.context = element('p', { class: 'context' });
    this.alerts = element('div', {});
    this.trend = element('div');
    this.charts = element('div');
    this.stepSlider = element('input', {
      type: 'range',
      min: 0,
      'aria-label': 'Step',
      oninput: () => onStep(this.subject.runs[0].steps[Number(this.stepSlider.value)]),
    });
    this.stepText = element('output', {});
    this.shiftSlider = element('input', {
      type: 'range',
      min: -LARGEST_SHIFT,
      max: LARGEST_SHIFT,
      value: 0,
      'aria-label': 'Power of two that multiplies the tensor before the cast',
      title: 'Multiply the tensor by a power of two before the cast (keys [ and ])',
      oninput: () => this.setShift(Number(this.shiftSlider.value)),
    });
    this.shiftText = element('output', {});
    this.reset = element(
      'button',
      { type: 'button', title: 'Shift by 2⁰', onclick: () => this.setShift(0) },
      'Reset',
    );
    this.logBox = element('input', { type: 'checkbox', onchange: () => this.toggleLog() });
    const close = element(
      'button',
      { type: 'button', class: 'round', 'aria-label': 'Close', title: 'Close (Esc)', onclick: onClose },
      '✕',
    );
    this.node = element(
      'aside',
      { class: 'detail', 'aria-label': 'Tensor', hidden: true },
      element('div', { class: 'detail-head' }, element('div', {}, this.title, this.context), close),
      this.alerts,
      element(
        'div',
        { class: 'detail-body' },
        element(
          'div',
          {},
          element('h3', {}, 'log₂ RMS over the steps'),
          this.trend,
          slider('Step', this.stepSlider, this.stepText, null),
        ),
        element(
          'div',
          {},
          element(
            'div',
            { class: 'detail-bar' },
            element('h3', {}, 'Exponents and formats'),
            element('label', { title: 'Logarithmic counts (key l)' }, this.logBox, 'log counts'),
          ),
          slider('Shift', this.shiftSlider, this.shiftText, this.reset),
          this.charts,
        ),
      ),
    );
  }

  /**
   * Shows a tensor: `name`, `module`, `step`, `stored`, `direction`, and `runs`, the `RunScales` of
   * the runs that have it.
   */
  async show(subject) {
    this.subject = subject;
    this.node.hidden = false;
    this.#drawHead();
    this.#draw();
    await Promise.all(subject.runs.map((run) => this.#fetch(run, subject.name)));
    if (this.subject === subject) this.#draw();
  }

  /** Shows the same tensor at another step. */
  setStep(step) {
    this.subject.step = step;
    this.#draw();
  }

  /** Multiplies the tensor by a power of two before the casts. */
  setShift(shift) {
    this.shift = Math.min(Math.max(shift, -LARGEST_SHIFT), LARGEST_SHIFT);
    this.#draw();
  }

  /** Shows the tensor in the range of a format. */
  choose(format) {
    this.chosen = format;
    this.#draw();
  }

  toggleLog() {
    this.isLog = !this.isLog;
    this.#draw();
  }

  hide() {
    this.subject = null;
    this.node.hidden = true;
  }

  /** Drops the loaded data, since the run has grown. */
  forget() {
    this.series.clear();
  }

  async #fetch(run, name) {
    const key = [run.run, run.direction, name].join('\n');
    if (this.series.has(key)) return;
    const found = { exponents: null, monitored: null, error: null };
    this.series.set(key, found);
    const query = { run: run.run, direction: run.direction, tensor: name };
    try {
      const exponents = await this.load('exponents', query);
      found.exponents = new ExponentSeries(exponents.header, exponents.arrays);
      // The server may need long for these, so the histogram does not wait for them.
      this.load('fractions', query).then(({ header, arrays }) => {
        found.monitored = new MonitoredFractions(header, arrays);
        if (this.subject?.name === name) this.#draw();
      }, () => {});
    } catch (error) {
      found.error = error.message;
      this.series.delete(key);
    }
  }

  #drawHead() {
    const { name, module, direction, runs } = this.subject;
    const rest = module && name.startsWith(`${module}.`) ? name.slice(module.length + 1) : name;
    this.title.replaceChildren(
      element('span', { class: 'path' }, name.slice(0, name.length - rest.length)),
      rest,
    );
    this.title.title = name;
    const what = direction === 'forward' ? 'values' : 'gradients';
    this.context.textContent = `${what}${runs.length ? '' : ': not in these runs'}`;
  }

  #draw() {
    if (!this.subject) return;
    const { module, step, stored, runs, direction } = this.subject;
    const what = direction === 'forward' ? 'values' : 'gradients';
    this.context.textContent = `${stored ? 'stored' : 'true'} ${what}`;
    if (module) this.context.title = `computed by ${module}`;
    this.logBox.checked = this.isLog;
    this.shiftSlider.value = this.shift;
    this.shiftText.textContent = `× ${power(this.shift)}`;
    this.reset.disabled = this.shift === 0;
    this.alerts.replaceChildren(...this.#alertsAt(step));
    if (!runs.length) {
      this.trend.replaceChildren();
      this.charts.replaceChildren();
      return;
    }
    const { steps } = runs[0];
    const column = columnAt(steps, step);
    this.stepSlider.max = steps.length - 1;
    this.stepSlider.value = column;
    this.stepSlider.disabled = steps.length < 2;
    this.stepText.textContent = steps[column].toLocaleString('en');
    this.stepSlider.setAttribute('aria-valuetext', `step ${steps[column]}`);
    this.trend.replaceChildren(this.#trend());
    const found = runs.map((run) => this.#atStep(run));
    this.shiftSlider.disabled = !found.some(({ counts }) => counts);
    const domain = exponentDomain(found.map(({ series }) => series), stored);
    this.charts.replaceChildren(
      ...found.map((one, place) => this.#chart(one, domain, place)),
      ...this.#table(found),
      ...[blockTable(found)].filter(Boolean),
    );
  }

  /** Returns the alerts about the tensor at the step. */
  #alertsAt(step) {
    const { name, runs } = this.subject;
    return runs.flatMap(({ run, alertsOf }) =>
      (alertsOf.get(name) ?? [])
        .filter((one) => one.step === step)
        .map(({ text }) => element('p', { class: 'alert' }, runs.length > 1 ? `${run}, ${text}` : text)),
    );
  }

  /** Returns the data of the tensor in one run at the step. */
  #atStep(run) {
    const { name, step, stored } = this.subject;
    const { shift } = this;
    const known = this.series.get([run.run, run.direction, name].join('\n'));
    const column = columnAt(run.steps, step);
    const tensor = run.position.get(name);
    const unit = run.unit(column, tensor);
    // The device counted the stored, unshifted tensor at a sampled step.
    const isCounted = shift === (stored ? 0 : -unit);
    return {
      run,
      unit,
      step: run.steps[column],
      value: run.value(column, tensor, stored),
      bad: run.bad(column, tensor),
      series: known?.exponents ?? null,
      error: known?.error ?? null,
      counts: known?.exponents?.at(step, stored) ?? null,
      shareRead: () => known?.monitored?.shareRead(run.steps[column]) ?? 1,
      blocks: () => known?.monitored?.blocksAt(run.steps[column]) ?? [],
      monitored: (format) => (isCounted ? known?.monitored?.at(run.steps[column], format) ?? null : null),
    };
  }

  #trend() {
    const { name, step, stored, runs } = this.subject;
    const lines = runs.map((run) => {
      const tensor = run.position.get(name);
      const values = run.steps.map((_, column) => run.value(column, tensor, stored));
      return { steps: run.steps, values };
    });
    const label = `log2 RMS of ${name} over the steps`;
    return trend({ lines, step, label, onStep: this.onStep });
  }

  #chart({ run, unit, step, value, bad, series, error, counts }, domain, place) {
    const { name, runs } = this.subject;
    const several = runs.length > 1;
    // The runs may have been sampled at different steps.
    const other = step === runs[0].steps[columnAt(runs[0].steps, this.subject.step)] ? null : step;
    const parts = [
      several ? element('h4', { class: `run-${place}` }, run.run) : null,
      element('p', { class: 'summary' }, summaryLine({ step: other, value, unit, bad, counts })),
    ];
    if (counts) {
      const isLast = place === runs.length - 1;
      const drawing = histogram({
        counts,
        domain,
        shift: this.shift,
        format: this.#format(),
        lanes: isLast ? this.formats : [],
        bars: several ? 84 : 132,
        isLog: this.isLog,
        label: `Exponent histogram of ${name} at step ${counts.step}, run ${run.run}`,
        onChoose: (format) => this.choose(format),
      });
      parts.push(drawing, isLast ? bandKey(this.#format()) : null);
      if (counts.step !== step) {
        parts.push(element('p', { class: 'note' }, `Counted at step ${counts.step.toLocaleString('en')}.`));
      }
    } else {
      const none = 'No exponent counts of this tensor: ScaleMonitor(histograms=False) leaves them out.';
      parts.push(element('p', { class: 'note' }, series ? none : error ?? 'Loading …'));
    }
    return element('section', { class: 'chart', 'data-run': run.run }, ...parts);
  }

  #table(found) {
    const { shift, formats } = this;
    // Counts of the device exist without a histogram too.
    const monitored = formats.filter(({ name }) => found.every((one) => one.monitored(name)));
    const hasCounts = found.some(({ counts }) => counts);
    if (!hasCounts && !monitored.length) return [];
    const table = fractionTable({
      runs: found,
      shift,
      formats,
      chosen: this.#format(),
      onChoose: (format) => this.choose(format),
    });
    const number = Math.max(...found.map(({ counts }) => counts?.numSampled ?? 0));
    const names = monitored.map(({ name }) => name.replace('FN', '')).join(', ');
    const sampled = `from the exponents of ${number.toLocaleString('en')} elements`;
    const shares = found.map((one) => one.shareRead()).filter((one) => one < 1);
    const read = shares.length
      ? `estimated from a sample of ${(100 * Math.min(...shares)).toPrecision(2)} % of the elements`
      : 'all elements counted';
    const counted = monitored.length ? [`${names}: ${read}.`] : [];
    if (hasCounts) counted.push(`${monitored.length ? 'Others' : 'Shares'}: ${sampled}.`);
    return [table, element('p', { class: 'note' }, counted.join(' '))];
  }

  #format() {
    return this.formats.find(({ name }) => name === this.chosen);
  }
}

function slider(text, input, output, extra) {
  return element('div', { class: 'slider' }, element('span', {}, text), input, output, extra);
}
