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
      'Shown',
      'view',
      [
        ['true', 'True value', 'What the model computes with (key s switches)'],
        ['stored', 'Stored value', 'What is in memory: the true value over its unit (key s switches)'],
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
      title: 'Words that a name must have, all of them; !word excludes; *.weight is a pattern of the whole name',
      oninput: () => on.filter(this.filter.value),
      value: state.filter,
    });
    this.operands = element('input', {
      type: 'checkbox',
      name: 'operands',
      onchange: () => on.operandsOnly(this.operands.checked),
    });
    this.count = element('output', { class: 'count', 'aria-live': 'polite' });
    const title = 'Only what matmuls read: operands, or gradients that arrive at matmuls (key o)';
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
      labelled('Run', this.run),
      labelled('Compare with', this.compared),
      this.direction.node,
      this.view.node,
      this.rows.node,
      element('div', { class: 'filter' }, labelled('Tensors', this.filter), shown),
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

  /** Whether only operands are shown; null if nobody knows which those are. */
  setOperandsOnly(isChosen) {
    this.operands.checked = isChosen === true;
    this.operands.disabled = isChosen === null;
  }

  setCount(shown, all) {
    this.count.textContent = shown === all ? `${all} tensors` : `${shown} of ${all} tensors`;
  }
}

function labelled(text, control) {
  return element('label', { class: 'labelled' }, element('span', {}, text), control);
}

/** A run's name without its middle: runs differ at the end, where a list would cut them off. */
function shortName(name) {
  return name.length > 30 ? `${name.slice(0, 9)}…${name.slice(-20)}` : name;
}

function fill(select, choices, chosen) {
  // A list that is open would close when its choices are made anew.
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
  ['← → ↑ ↓', 'move the selected cell; with Page Up, Page Down, Home, End by more'],
  ['Enter', 'select a cell: the last step of the first tensor'],
  ['/', 'filter the tensors'],
  ['f, b', 'forward, backward'],
  ['s', 'true value, stored value'],
  ['o', 'only operands of matmuls, or all tensors'],
  ['z', 'fit all rows, rows with names'],
  ['[ ]', 'shift the tensor by a power of two'],
  ['l', 'logarithmic counts'],
  ['?', 'this help'],
  ['Esc', 'close what is open'],
];

const READING = [
  ['Row', 'a tensor: first the parameters, then the results of operations, in the order of computation'],
  ['Column', 'a sampled step'],
  ['Colour', 'RMS of the tensor, in powers of two: blue below 1, orange above; near 1 it fades into the page'],
  ['Forward', 'values'],
  ['Backward', 'gradients of the same tensors'],
  ['True value', 'what the model computes with'],
  ['Stored value', 'what is in memory and meets number formats: another scale only with unit scaling'],
  ['Operands', 'what matmuls read, marked by a bar; backward, the gradients that arrive at matmuls'],
];

/** How to read the page, and the list of keys, as a dialog. */
export function keysDialog() {
  const terms = READING.map(([term, text]) => [element('dt', {}, term), element('dd', {}, text)]);
  const rows = KEYS.map(([keys, text]) => [element('dt', {}, element('kbd', {}, keys)), element('dd', {}, text)]);
  const dialog = element(
    'dialog',
    { class: 'keys', 'aria-label': 'Help' },
    element('h2', {}, 'How to read the map'),
    element('dl', {}, terms.flat()),
    element('p', {}, 'A click on a cell shows how the tensor fits into the number formats.'),
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
