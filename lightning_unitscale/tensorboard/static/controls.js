// The bar above the heat map: which runs, which direction, which tensors.

import { element, segments } from './dom.js';

/** The controls; every handler of `on` is told the new value. */
export class Controls {
  constructor(state, on) {
    this.run = element('select', { onchange: () => on.run(this.run.value) });
    this.compared = element('select', { onchange: () => on.compared(this.compared.value || null) });
    this.direction = segments(
      'Direction',
      'direction',
      [
        ['forward', 'Forward', 'Values (key f)'],
        ['backward', 'Backward', 'Gradients (key b)'],
      ],
      state.direction,
      on.direction,
    );
    this.view = segments(
      'Shown as',
      'view',
      [
        ['meant', 'As meant', 'What the tensors mean to the model (key s switches)'],
        ['stored', 'As stored', 'What is in memory, divided by its unit (key s switches)'],
      ],
      state.stored ? 'stored' : 'meant',
      (value) => on.stored(value === 'stored'),
    );
    this.rows = segments(
      'Rows',
      'rows',
      [
        ['fit', 'Fit', 'All tensors at once (key z switches)'],
        ['named', 'Named', 'Rows high enough for names (key z switches)'],
      ],
      'fit',
      on.rows,
    );
    this.filter = element('input', {
      type: 'search',
      placeholder: 'attn, *.weight, !bias   ( / )',
      spellcheck: 'false',
      autocomplete: 'off',
      title: 'Words that a name has to have; * and ? make it a glob of the whole name; ! excludes',
      oninput: () => on.filter(this.filter.value),
    });
    this.count = element('output', { class: 'count', 'aria-live': 'polite' });
    const help = element(
      'button',
      { type: 'button', class: 'round', title: 'Keys (?)', 'aria-label': 'Keys', onclick: on.help },
      '?',
    );
    this.node = element(
      'header',
      { class: 'controls' },
      labelled('Run', this.run),
      labelled('Compare with', this.compared),
      this.direction.node,
      this.view.node,
      this.rows.node,
      element('div', { class: 'filter' }, labelled('Tensors', this.filter), this.count),
      help,
    );
  }

  setRuns(names, run, compared) {
    fill(this.run, names.map((name) => [name, name]), run);
    const others = names.filter((name) => name !== run);
    fill(this.compared, [['', 'nothing'], ...others.map((name) => [name, name])], compared ?? '');
    this.compared.disabled = !others.length;
  }

  setCount(shown, all) {
    this.count.textContent = shown === all ? `${all}` : `${shown} of ${all}`;
  }
}

function labelled(text, control) {
  return element('label', { class: 'labelled' }, element('span', {}, text), control);
}

function fill(select, choices, chosen) {
  const options = choices.map(([value, text]) =>
    element('option', { value, selected: value === chosen }, text),
  );
  select.replaceChildren(...options);
  select.title = chosen;
}

const KEYS = [
  ['← → ↑ ↓', 'move the selected cell; with Page Up, Page Down, Home, End by more'],
  ['Enter', 'select the first cell'],
  ['/', 'filter the tensors'],
  ['f, b', 'forward, backward'],
  ['s', 'as meant, as stored'],
  ['z', 'fit all rows, rows with names'],
  ['[ ]', 'shift the tensor by a power of two'],
  ['l', 'logarithmic counts'],
  ['Esc', 'close what is open'],
];

/** The list of keys as a dialog. */
export function keysDialog() {
  const rows = KEYS.map(([keys, text]) => [element('dt', {}, element('kbd', {}, keys)), element('dd', {}, text)]);
  const dialog = element(
    'dialog',
    { class: 'keys', 'aria-label': 'Keys' },
    element('h2', {}, 'Keys'),
    element('dl', {}, rows.flat()),
    element('form', { method: 'dialog' }, element('button', {}, 'Close')),
  );
  return dialog;
}

/** Keys for screen readers, which read it with the heat map. */
export function keysDescription() {
  const text = 'Arrow keys move the selected cell. F forward, B backward, S stored, slash filters.';
  return element('p', { id: 'scales-keys', class: 'unseen' }, text);
}
