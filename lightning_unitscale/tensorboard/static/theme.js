// Follows the light or dark theme of TensorBoard, or else of the reader's system.

/** Returns the current theme (`name`), and calls listeners when it changes. */
export function watchTheme() {
  const listeners = [];
  const system = matchMedia('(prefers-color-scheme: dark)');
  const host = hostBody();
  const isDark = () => (host ? host.classList.contains('dark-mode') : system.matches);
  const theme = { name: '', onChange: (listener) => listeners.push(listener) };
  const apply = () => {
    const name = isDark() ? 'dark' : 'light';
    if (name === theme.name) return;
    theme.name = name;
    document.documentElement.dataset.theme = name;
    listeners.forEach((listener) => listener());
  };
  apply();
  system.addEventListener('change', apply);
  if (host) new MutationObserver(apply).observe(host, { attributeFilter: ['class'] });
  return theme;
}

/** Returns the body of the TensorBoard page around this frame; null if it is inaccessible. */
function hostBody() {
  if (window.parent === window) return null;
  try {
    return window.parent.document.body;
  } catch {
    return null;
  }
}
