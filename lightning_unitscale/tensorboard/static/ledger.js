// The last precision report of a run: tables of the damage of each computation of each matmul.

import { element } from './dom.js';

export class Ledger {
  constructor({ load, onSelect }) {
    this.load = load;
    this.onSelect = onSelect;
    this.title = element('summary', {});
    this.tables = element('div', { class: 'ledger-tables' });
    this.node = element('details', { class: 'ledger', hidden: true }, this.title, this.tables);
    this.shown = '';
  }

  /** Shows the report of a run, {name, version}; rows of known tensors select them. */
  async set({ name, version }, known) {
    const key = JSON.stringify([name, version]);
    if (key === this.shown) return;
    this.shown = key;
    const found = await this.load({ run: name }).catch(() => null);
    // It is asked for again with the next change of the run.
    if (this.shown !== key) return;
    this.node.hidden = found === null;
    if (found !== null) this.#show(name, found, new Set(known));
  }

  #show(name, { step, summary, columns, tables }, known) {
    const line = ` of ${name} at step ${step.toLocaleString('en')}: ${summary.slice(1).join('; ')}`;
    this.title.replaceChildren(element('b', {}, 'Precision'), line);
    this.tables.replaceChildren(
      ...tables.map(({ title, direction, rows }) =>
        element(
          'table',
          { class: 'ledger-table' },
          element('caption', {}, title),
          element('thead', {}, element('tr', {}, ...columns.map((text) => element('th', {}, text)))),
          element('tbody', {}, ...rows.map((cells) => this.#row(cells, { step, direction }, known))),
        ),
      ),
    );
  }

  #row([tensor, ...cells], place, known) {
    const go = () => this.onSelect({ tensor, ...place });
    const title = 'Show the tensor at this step';
    const first = known.has(tensor) ? element('button', { type: 'button', title, onclick: go }, tensor) : tensor;
    return element('tr', {}, ...[first, ...cells].map((cell) => element('td', {}, cell)));
  }
}
