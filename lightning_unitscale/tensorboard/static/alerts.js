// The monitor's alerts, as a list whose entries select the tensor and the step.

import { element } from './dom.js';

/** The names of the kinds of alerts. */
export const KINDS = {
  loss: 'NaN or inf loss',
  nonfinite: 'NaN or inf',
  overflow: 'overflow',
  subnormal: 'subnormal',
  flushed: 'flushed',
  trend: 'trend',
};

/** The list, folded at first; it calls `onSelect` with an alert. */
export class AlertList {
  constructor({ onSelect }) {
    this.onSelect = onSelect;
    this.title = element('summary', {});
    this.list = element('ol', {});
    this.node = element('details', { class: 'alerts', hidden: true }, this.title, this.list);
    this.shown = '';
  }

  /** Shows the alerts of the shown runs, each {run, alerts} in the order of the steps. */
  set(runs) {
    const found = runs.filter(({ alerts }) => alerts.length);
    this.node.hidden = !found.length;
    const key = JSON.stringify(found.map(({ run, alerts }) => [run, alerts]));
    // An open list keeps its scroll position.
    if (key === this.shown) return;
    this.shown = key;
    this.title.replaceChildren(...found.map((one) => element('span', {}, ...summary(one))));
    // The title names a single run.
    const several = found.length > 1;
    this.list.replaceChildren(
      ...found.flatMap(({ run, alerts }) => alerts.map((one) => this.#entry(one, several ? run : null))),
    );
  }

  #entry(alert, run) {
    const parts = [
      element('span', { class: `alert-kind ${alert.kind}` }, KINDS[alert.kind] ?? alert.kind),
      run === null ? null : element('span', { class: 'alert-run' }, run),
      element('span', {}, alert.text),
    ];
    // A loss has no row in the map.
    if (alert.kind === 'loss') return element('li', {}, element('p', {}, ...parts));
    const go = () => this.onSelect(alert);
    const title = 'Show the tensor at this step';
    return element('li', {}, element('button', { type: 'button', title, onclick: go }, ...parts));
  }
}

/** Returns the number of alerts and a description of the first. */
function summary({ run, alerts }) {
  const [first] = alerts;
  const number = alerts.length === 1 ? '1 alert' : `${alerts.length.toLocaleString('en')} alerts`;
  const gradient = first.direction === 'backward' ? 'gradient of ' : '';
  const about = first.kind === 'loss' ? '' : `, ${gradient}${first.tensor}`;
  const what = `${KINDS[first.kind] ?? first.kind}${about}`;
  return [element('b', {}, number), ` in ${run}, first at step ${first.step.toLocaleString('en')}: ${what}`];
}
