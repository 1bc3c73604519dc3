// The legend of the colors.

import { element } from './dom.js';
import { signed } from './model.js';

const LIMITS = [2, 4, 8, 12, 16, 24, 32];

/** A legend; it calls `onLimit` with 'auto' or a number. */
export class Legend {
  constructor({ onLimit }) {
    this.bar = element('div', { class: 'legend-bar', 'aria-hidden': 'true' });
    this.ticks = element('div', { class: 'legend-ticks' });
    this.zero = element('i', { class: 'swatch' });
    this.bad = element('i', { class: 'swatch' });
    this.flag = element('span', { class: 'legend-item', hidden: true }, element('i', { class: 'flag' }), 'alert');
    this.operand = element(
      'span',
      { class: 'legend-item', title: 'Operands of matmuls, and gradients of matmul outputs', hidden: true },
      element('i', { class: 'operand' }),
      'read by matmuls',
    );
    this.headline = element('b', { class: 'headline' });
    this.notice = element('button', { type: 'button', class: 'notice', hidden: true });
    this.select = element(
      'select',
      {
        'aria-label': 'Range of the colors',
        title: 'Range of the colors; auto includes 98 % of all cells',
        onchange: () => onLimit(this.select.value === 'auto' ? 'auto' : Number(this.select.value)),
      },
      element('option', { value: 'auto' }, 'auto'),
      ...LIMITS.map((limit) => element('option', { value: limit }, `2^±${limit}`)),
    );
    this.node = element(
      'div',
      { class: 'legend' },
      element('span', { class: 'legend-title' }, 'RMS'),
      element('div', { class: 'legend-scale' }, this.bar, this.ticks),
      element('label', { class: 'legend-item' }, 'range', this.select),
      element('span', { class: 'legend-item' }, this.zero, 'all zero'),
      element('span', { class: 'legend-item' }, this.bad, 'NaN or inf'),
      element('span', { class: 'legend-item' }, element('i', { class: 'swatch missing' }), 'not measured'),
      this.operand,
      this.flag,
      this.headline,
      this.notice,
    );
  }

  /**
   * Shows the colors, the symbols for flags and marks if the map has them, a headline, and the
   * first NaN ({name, step} or null), which `onBad` selects.
   */
  set(palette, { hasFlags, hasMarks, headline, bad, onBad }) {
    this.flag.hidden = !hasFlags;
    this.operand.hidden = !hasMarks;
    this.headline.textContent = headline;
    this.notice.hidden = !bad;
    if (bad) {
      const step = bad.step.toLocaleString('en');
      this.notice.textContent = `NaN or inf since step ${step}: ${bad.name}`;
      this.notice.onclick = onBad;
    }
    this.bad.style.background = palette.bad;
    const { limit } = palette;
    this.bar.style.background = palette.gradient();
    this.zero.style.background = palette.zero;
    const labels = [-1, -0.5, 0, 0.5, 1].map((share) => {
      const exponent = share * limit;
      return element('span', {}, ...(exponent ? ['2', element('sup', {}, signed(exponent))] : ['1']));
    });
    this.ticks.replaceChildren(...labels);
  }
}
