// Creates elements without a framework.

const SVG = 'http://www.w3.org/2000/svg';

/** Creates an HTML element; attributes whose name begins with `on` are event listeners. */
export function element(tag, attributes = {}, ...children) {
  return assembled(document.createElement(tag), attributes, children);
}

/** Creates an SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return assembled(document.createElementNS(SVG, tag), attributes, children);
}

function assembled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, '');
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

/** Calls `action` at most once per frame. */
export function oncePerFrame(action) {
  let asked = 0;
  return () => {
    if (!asked) {
      asked = requestAnimationFrame(() => {
        asked = 0;
        action();
      });
    }
  };
}

/** A choice of a few values: radio buttons that look like one divided button. */
export function segments(label, name, choices, chosen, onChoose) {
  const inputs = {};
  const parts = choices.map(([value, text, title]) => {
    inputs[value] = element('input', {
      type: 'radio',
      name,
      value,
      checked: value === chosen,
      onchange: () => onChoose(value),
    });
    return element('label', { title }, inputs[value], element('span', {}, text));
  });
  const node = element('fieldset', { class: 'segments' }, element('legend', {}, label), ...parts);
  return { node, set: (value) => (inputs[value].checked = true) };
}
