// What the monitor found wrong: a list whose entries lead to the tensor and the step.

import { element } from './dom.js';

const KINDS = {
  loss: 'loss',
  nonfinite: 'NaN or inf',
  overflow: 'overflow',
  subnormal: 'subnormal',
  flushed: 'flushed',
  trend: 'trend',
};

/** The list, folded until somebody opens it; `onSelect` is told the alert. */
export class AlertList {
  constructor({ onSelect }) {
    this.onSelect = onSelect;
    this.title = element('summary', {});
    this.list = element('ol', {});
    this.node = element('details', { class: 'alerts', hidden: true }, this.title, this.list);
    this.shown = '';
  }

  /** The alerts of a run, in the order of the steps. */
  set(alerts, run) {
    this.node.hidden = !alerts.length;
    const key = JSON.stringify([run, alerts]);
    // An open list stays where its reader scrolled it.
    if (key === this.shown) return;
    this.shown = key;
    if (!alerts.length) return;
    const number = alerts.length === 1 ? '1 alert' : `${alerts.length.toLocaleString('en')} alerts`;
    const [first] = alerts;
    const where = first.tensor === 'loss' ? 'the loss' : first.tensor;
    this.title.replaceChildren(
      element('b', {}, number),
      ` in ${run}, the first at step ${first.step.toLocaleString('en')}: ${where}`,
    );
    this.list.replaceChildren(...alerts.map((one) => this.#entry(one)));
  }

  #entry(alert) {
    const kind = element('span', { class: `alert-kind ${alert.kind}` }, KINDS[alert.kind] ?? alert.kind);
    const text = element('span', {}, alert.text);
    // A loss has no row of its own.
    if (alert.kind === 'loss') return element('li', {}, element('p', {}, kind, text));
    const go = () => this.onSelect(alert);
    const title = 'Show the tensor at this step';
    return element('li', {}, element('button', { type: 'button', title, onclick: go }, kind, text));
  }
}
