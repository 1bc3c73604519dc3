// Where two runs diverge, in one line that selects the tensor and the step.

import { element } from './dom.js';

export class Divergence {
  constructor({ load, onSelect }) {
    this.load = load;
    this.onSelect = onSelect;
    this.node = element('p', { class: 'divergence', hidden: true });
    this.shown = '';
  }

  /** Shows where two runs diverge, {run, version} each; hidden for one run. */
  async set(runs) {
    const key = runs.length === 2 ? JSON.stringify(runs.map(({ name, version }) => [name, version])) : '';
    if (key === this.shown) return;
    this.shown = key;
    this.node.hidden = true;
    if (!key) return;
    try {
      const found = await this.load({ run: runs[0].name, compared: runs[1].name });
      if (this.shown === key) this.#show(found);
    } catch (error) {
      // A report may lack it. The next change asks for it again.
      if (this.shown === key) this.shown = '';
    }
  }

  #show(found) {
    const [line] = found.text.split('\n');
    const go = () => this.onSelect(found);
    const title = 'Show the tensor at this step';
    this.node.replaceChildren(
      found.diverged ? element('button', { type: 'button', title, onclick: go }, line) : line,
    );
    this.node.hidden = false;
  }
}
