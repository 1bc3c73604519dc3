// The bar above the heat map, to choose runs, direction and tensors.

import { element, segments } from './dom.js';

/** The controls; they call every handler of `on` with the new value. */
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
      'Shown',
      'view',
      [
        ['true', 'True value', 'The unscaled value in your model (key s switches)'],
        ['stored', 'Stored value', 'What the matmul reads: the true value divided by its unit (key s switches)'],
      ],
      state.stored ? 'stored' : 'true',
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
      placeholder: 'attn !bias   (key /)',
      spellcheck: 'false',
      autocomplete: 'off',
      title: 'Names must contain all words; !word excludes; *.weight is a pattern for the whole name',
      oninput: () => on.filter(this.filter.value),
      value: state.filter,
    });
    this.operands = element('input', {
      type: 'checkbox',
      name: 'operands',
      onchange: () => on.operandsOnly(this.operands.checked),
    });
    this.count = element('output', { class: 'count', 'aria-live': 'polite' });
    const title = 'Only operands of matmuls, or gradients of matmul outputs (key o)';
    const check = element('label', { class: 'check', title }, this.operands, 'operands only');
    const shown = element('div', {}, this.count, check);
    const help = element(
      'button',
      { type: 'button', class: 'round', title: 'Help (key ?)', 'aria-label': 'Help', onclick: on.help },
      '?',
    );
    this.node = element(
      'header',
      { class: 'controls' },
      labeled('Run', this.run),
      labeled('Compare with', this.compared),
      this.direction.node,
      this.view.node,
      this.rows.node,
      element('div', { class: 'filter' }, labeled('Tensors', this.filter), shown),
      help,
    );
  }

  setRuns(names, run, compared) {
    const choices = names.map((name) => [name, shortName(name)]);
    fill(this.run, choices, run);
    const others = choices.filter(([name]) => name !== run);
    fill(this.compared, [['', 'nothing'], ...others], compared ?? '');
    this.compared.disabled = !others.length;
  }

  /** Sets whether only operands are shown; null if the operands are unknown. */
  setOperandsOnly(isChosen) {
    this.operands.checked = isChosen === true;
    this.operands.disabled = isChosen === null;
  }

  setCount(shown, all) {
    this.count.textContent = shown === all ? `${all} tensors` : `${shown} of ${all} tensors`;
  }
}

function labeled(text, control) {
  return element('label', { class: 'labeled' }, element('span', {}, text), control);
}

/** Shortens a run's name in the middle, since runs differ at the end. */
function shortName(name) {
  return name.length > 30 ? `${name.slice(0, 9)}…${name.slice(-20)}` : name;
}

function fill(select, choices, chosen) {
  // Replacing the choices would close an open list.
  const { options: known } = select;
  select.title = chosen;
  if (known.length === choices.length && choices.every(([value], place) => known[place].value === value)) {
    select.value = chosen;
    return;
  }
  const options = choices.map(([value, text]) =>
    element('option', { value, selected: value === chosen }, text),
  );
  select.replaceChildren(...options);
}

const KEYS = [
  ['← → ↑ ↓', 'move the selected cell; Page Up, Page Down, Home and End move further'],
  ['Enter', 'select a cell: the last step of the first tensor'],
  ['/', 'filter the tensors'],
  ['f, b', 'forward, backward'],
  ['s', 'true value, stored value'],
  ['o', 'only operands of matmuls, or all tensors'],
  ['z', 'fit all rows, rows with names'],
  ['[ ]', 'shift the tensor by a power of two'],
  ['l', 'logarithmic counts'],
  ['?', 'this help'],
  ['Esc', 'clear the filter, or close the panel or this help'],
];

const READING = [
  ['Row', 'a tensor: first the parameters, then the results of operations, in the order of computation'],
  ['Column', 'a sampled step'],
  ['Color', 'RMS of the tensor, in powers of two: blue below 1, orange above, the background color near 1'],
  ['Forward', 'values'],
  ['Backward', 'gradients of the same tensors'],
  ['True value', 'the unscaled value in your model'],
  ['Stored value', 'the scaled value, which has to fit the format; it differs from the true value only for scaled matmul operands'],
  ['Operands', 'the tensors that matmuls read, marked by a bar; backward, the gradients of matmul outputs'],
];

/** Returns a dialog that explains the page and lists the keys. */
export function keysDialog() {
  const terms = READING.map(([term, text]) => [element('dt', {}, term), element('dd', {}, text)]);
  const rows = KEYS.map(([keys, text]) => [element('dt', {}, element('kbd', {}, keys)), element('dd', {}, text)]);
  const dialog = element(
    'dialog',
    { class: 'keys', 'aria-label': 'Help' },
    element('h2', {}, 'How to read the map'),
    element('dl', {}, terms.flat()),
    element('p', {}, 'Click a cell to see how the tensor fits into the number formats.'),
    element('h2', {}, 'Keys'),
    element('dl', {}, rows.flat()),
    element('form', { method: 'dialog' }, element('button', {}, 'Close')),
  );
  return dialog;
}

/** Returns a description of the keys for screen readers. */
export function keysDescription() {
  const text = 'Arrow keys move the selected cell. F forward, B backward, S stored, slash filters.';
  return element('p', { id: 'scales-keys', class: 'unseen' }, text);
}
